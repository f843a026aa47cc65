"""`recover.stream`: microbatches by number from any dataset, the same ones on every replica.

Microbatch i is a function of (seed, i) alone. The draws of a dataset from the generators of torch, Python or
numpy while it is read follow from them, too, and the user's own generators are left unchanged.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from recover.data.readers import Readers
from recover.data.shuffle import Shuffle
from recover.step.in_flight import dataloader_remedy
from recover.step.position import is_whole
from recover.step.randomness import Randomness

WINDOW = 1024
Collate = Callable[[list[Any]], Any]


def stream(
    dataset: Any,
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    collate_fn: Collate | None = None,
    workers: int = 0,
    epochs: int | None = None,
    window: int | None = None,
) -> MapStream | IterableStream:
    """A stream for `step.microbatches` and `step.rounds`: `stream[i]` is microbatch i, on every replica.

    dataset:     map-style, with a length (torch, Hugging Face `datasets`, a list), or anything that can be iterated
                 (an IterableDataset, a streaming one of Hugging Face, a generator)
    batch_size:  items in a microbatch; each has as many, what is left over at the end of a pass is left out
    shuffle:     another order in every pass, by (seed, pass); map-style only
    seed:        of the order and of what the dataset draws while it is read; no other generator influences it
    collate_fn:  makes a microbatch of a list of items; torch's default_collate, if not given
    workers:     processes that read what this replica owes to this step and the next; 0: the rank reads when
                 needed. An iterable has one at most
    epochs:      passes over a map-style dataset, after which there is nothing more; None: as many as are asked for
    window:      of an iterable: how many microbatches back one may be asked for again. At least a whole step (B)
    """
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("epochs", epochs, 1)):
        if value is not None and not is_whole(value):
            raise TypeError(f"{name}={value!r} must be a whole number")
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(
            f"collate_fn={collate_fn!r} must be a function that makes a microbatch of a list of items"
        )
    if (mend := dataloader_remedy(dataset)) is not None:
        raise TypeError(f"recover.stream was given a DataLoader, which has an order of its own; {mend}")
    if isinstance(dataset, Mapping | str) or not (_is_map_style(dataset) or isinstance(dataset, Iterable)):
        raise TypeError(
            f"recover.stream was given a {type(dataset).__name__}; give a dataset with __len__ and __getitem__, or "
            "something that can be iterated (of a DatasetDict one split: dataset['train'])"
        )
    if not _is_map_style(dataset):
        return _iterable(dataset, batch_size, shuffle, seed, collate_fn, workers, epochs, window)
    if window is not None:
        raise ValueError(
            f"window={window} is for what is read in order; a map-style dataset is read anywhere"
        )
    return MapStream(dataset, batch_size, shuffle, seed, collate_fn or _default_collate(), workers, epochs)


class ReadAhead:
    """A stream over a user's dataset: microbatches are read here or ahead, with random generators of their own."""

    def __init__(self, seed: int, workers: int, **order: int) -> None:
        """`order`: arguments that decide, with the seed, which items a microbatch has."""
        # Checkpoints hold it as JSON, and a seed may be a number of numpy or a string.
        self.recover_order = {"seed": int(seed) if is_whole(seed) else str(seed), **order}
        self._randomness = Randomness(seed, shard=0)
        self._readers = Readers(self._read, self._read_here, workers)

    def __getitem__(self, index: int) -> Any:
        if not is_whole(index):
            raise TypeError(f"microbatch {index!r}: a stream gives one at a time, by its number")
        if index < 0:
            raise IndexError(f"microbatch {index}: microbatches are numbered from 0")
        return self._readers.get(index)

    def expect(self, coming: Sequence[int], kept: range) -> None:
        """Announce what to read ahead. Called by a step: this replica will ask for `coming`, and after
        deaths perhaps for any of `kept`."""
        self._readers.announce(coming)

    def _read_here(self, index: int) -> Any:
        """Read in this rank, whose own random generators continue as if nothing had been read. A worker needs no such
        care."""
        with self._randomness.apart():
            return self._read(index)

    def _read(self, index: int) -> Any:
        raise NotImplementedError


class MapStream(ReadAhead):
    """A stream over a dataset with random access. `len(stream)` microbatches make one pass."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        seed: int,
        collate_fn: Collate,
        workers: int,
        epochs: int | None,
    ) -> None:
        super().__init__(seed, workers, batch_size=int(batch_size), shuffle=bool(shuffle), items=len(dataset))
        self._dataset, self._batch_size, self._collate = dataset, batch_size, collate_fn
        self._shuffle, self._seed, self.epochs = shuffle, seed, epochs
        self._pass, self._order = -1, Shuffle(0, "")
        if not len(self):
            raise ValueError(
                f"the dataset has {len(dataset)} items, fewer than one microbatch of batch_size={batch_size}"
            )

    def __len__(self) -> int:
        return len(self._dataset) // self._batch_size

    def items(self, index: int) -> list[int]:
        """The items of the dataset that make up this microbatch."""
        number, position = divmod(index, len(self))
        if self.epochs is not None and number >= self.epochs:
            raise IndexError(
                f"there is no microbatch {index}: {self.epochs} epoch(s) of {len(self)} microbatches are all; end the "
                "loop before (steps = epochs * len(stream) // global_batch), or raise epochs="
            )
        places = range(position * self._batch_size, (position + 1) * self._batch_size)
        if not self._shuffle:
            return list(places)
        if number != self._pass:
            self._pass, self._order = number, Shuffle(len(self._dataset), f"{self._seed}/{number}")
        return [self._order[place] for place in places]

    def expect(self, coming: Sequence[int], kept: range) -> None:
        last = None if self.epochs is None else self.epochs * len(self)
        super().expect([index for index in coming if last is None or index < last], kept)

    def _read(self, index: int) -> Any:
        items = self.items(index)
        self._randomness.sample(index)
        if hasattr(self._dataset, "__getitems__"):  # all at once, as DataLoader does
            return self._collate(self._dataset.__getitems__(items))
        return self._collate([self._dataset[item] for item in items])


class IterableStream(ReadAhead):
    """A stream over a dataset that can only be read in order: every replica reads all of it, and keeps what may be
    asked for again. A resumed run reads from the beginning, up to where it stopped."""

    def __init__(
        self,
        iterable: Iterable[Any],
        batch_size: int,
        seed: int,
        collate_fn: Collate,
        workers: int,
        window: int,
    ) -> None:
        super().__init__(seed, workers, batch_size=int(batch_size))
        self._iterable, self._batch_size, self._collate, self._window = (
            iterable,
            batch_size,
            collate_fn,
            window,
        )
        self._iterator: Iterator[Any] | None = None
        # Items of the last microbatches. A worker is a step ahead, and also keeps the step in progress.
        self._held: deque[list[Any]] = deque(maxlen=2 * window if workers else window)
        self._next = 0  # the microbatch that is read next
        self._begun = False

    def expect(self, coming: Sequence[int], kept: range) -> None:
        if len(kept) > self._window:
            raise ValueError(
                f"a step has {len(kept)} microbatches, and window={self._window}: what a death leaves could not be "
                f"read again; give recover.stream window={len(kept)} or more"
            )
        if not self._begun and kept.start:
            warnings.warn(
                f"the run goes on at microbatch {kept.start}, and an iterable is read from its beginning: "
                f"{kept.start * self._batch_size:,} items are read and passed over first; a dataset with __len__ and "
                "__getitem__ needs none of that",
                stacklevel=2,
            )
        self._begun = True
        # In order: everything up to the last of them is read, whichever replica needs it.
        super().expect(sorted(coming), kept)

    def _read(self, index: int) -> Any:
        if index < self._next - len(self._held):
            raise IndexError(
                f"microbatch {index} of an iterable has been left behind: {self._next} were read and window="
                f"{self._window} of them are kept; give recover.stream a larger window="
            )
        while self._next <= index:
            self._held.append(self._next_items())
            self._next += 1
        self._randomness.sample(index)
        return self._collate(list(self._held[index - self._next]))

    def _next_items(self) -> list[Any]:
        if self._iterator is None:
            self._randomness.in_order(-1)
            self._iterator = iter(self._iterable)
        self._randomness.in_order(self._next)
        items = []
        for number in range(self._next * self._batch_size, (self._next + 1) * self._batch_size):
            try:
                items.append(next(self._iterator))
            except StopIteration:
                raise IndexError(
                    f"there is no microbatch {self._next}: the iterable has ended after {number} items; end the loop "
                    "before, or let it go on (itertools.chain, .repeat())"
                ) from None
        return items


def _iterable(
    iterable: Iterable[Any],
    batch_size: int,
    shuffle: bool,
    seed: int,
    collate_fn: Collate | None,
    workers: int,
    epochs: int | None,
    window: int | None,
) -> IterableStream:
    if shuffle:
        raise ValueError(
            "shuffle=True needs a dataset with __len__ and __getitem__; shuffle an iterable itself, by a seed that is "
            "the same on every replica (datasets: .shuffle(seed=0))"
        )
    if epochs is not None:
        raise ValueError(f"epochs={epochs} needs a dataset with a length; an iterable ends where it ends")
    if workers > 1:
        raise ValueError(
            f"workers={workers}: an iterable is read in order, by one process at most; give workers=1"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1, and at least the microbatches of a step")
    return IterableStream(
        iterable, batch_size, seed, collate_fn or _default_collate(), workers, window or WINDOW
    )


def _is_map_style(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return not isinstance(dataset, IterableDataset) and all(
        hasattr(dataset, name) for name in ("__len__", "__getitem__")
    )


def _default_collate() -> Collate:
    from torch.utils.data import default_collate

    return default_collate
