"""Data: microbatches by their number in the run, in the order of the trainer's own loader on one
process."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.utils.data import IterableDataset

from recover.data.indexed import IterableStream, ReadAhead
from recover.data.readers import Readers


def stream_of(loader: Any, batch: int, seed: int, workers: int) -> EpochStream | EndlessStream:
    """The microbatches of a loader as a stream. `batch`: B. Raises ValueError for a loader whose order replicas cannot
    follow."""
    if isinstance(loader.dataset, IterableDataset):
        if hasattr(loader.dataset, "__len__"):
            raise ValueError(
                "an iterable dataset is read once, in order, and its epochs would end in the middle of a step (it has "
                "__len__); give a dataset with __getitem__, or an iterable without a length and max_steps"
            )
        collate, size = loader.collate_fn, loader.batch_size
        return EndlessStream(loader.dataset, size, seed, collate, min(workers, 1), 2 * batch)
    if loader.batch_sampler is None or loader.generator is not None:
        raise ValueError(
            "the training loader has no batch sampler, or a generator of its own, whose draws a joining replica cannot "
            "repeat; give it batch_size=, and a sampler that draws from torch's generator or from its epoch"
        )
    return EpochStream(loader, batch, seed, workers)


class EpochStream(ReadAhead):
    """Pairs of a number and its microbatch. Step s of the run has the numbers from s*B to s*B + B - 1;
    in the last step of an epoch some may have None instead of a microbatch."""

    def __init__(self, loader: Any, batch: int, seed: int, workers: int) -> None:
        super().__init__(seed, workers, items=len(loader.dataset))
        self._loader, self._batch, self._workers = loader, batch, workers
        self._items, self._ends = torch.zeros(0, dtype=torch.int64), [0]
        self.place: dict[str, Any] = {}

    def begin(self, epoch: int, first: int, generator: torch.Tensor | None = None) -> None:
        """Begin an epoch, whose first step is number `first` of the run, from 0.

        generator: state of torch's generator from which its order is drawn; by default the present
        one, which advances as in the trainer's own loop
        """
        before = torch.get_rng_state()
        self.place = {"epoch": epoch, "first": first, "generator": before if generator is None else generator}
        torch.set_rng_state(self.place["generator"])
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        torch.empty((), dtype=torch.int64).random_()  # as an iterator of DataLoader does
        batches = list(self._loader.batch_sampler)
        if generator is not None:
            torch.set_rng_state(before)
        self._items = torch.tensor([item for items in batches for item in items])
        self._ends = [0, *torch.tensor([len(items) for items in batches]).cumsum(0).tolist()]
        self._readers = Readers(self._read, self._read_here, self._workers)  # workers have the old order

    @property
    def digest(self) -> int:
        """Checksum of the order of this epoch."""
        return zlib.crc32(self._items.numpy().tobytes())

    def filled(self, step: int) -> int:
        """How many microbatches step number `step`, from 0, has."""
        return min(self._batch, len(self._ends) - 1 - (step - self.place["first"]) * self._batch)

    def _read(self, index: int) -> tuple[int, Any]:
        place = index - self.place["first"] * self._batch
        if place >= len(self._ends) - 1:
            return index, None
        items = self._items[self._ends[place] : self._ends[place + 1]].tolist()
        self._randomness.sample(index)
        data = self._loader.dataset
        whole = hasattr(data, "__getitems__")
        rows = data.__getitems__(items) if whole else [data[item] for item in items]
        return index, self._loader.collate_fn(rows)


class EndlessStream(IterableStream):
    """Like `EpochStream`, for an iterable dataset: one epoch, in which every step is full."""

    digest = 0  # the dataset itself determines the order

    def begin(self, epoch: int, first: int, generator: torch.Tensor | None = None) -> None:
        if epoch:
            raise ValueError(f"an iterable dataset is read once, and epoch {epoch} begins; leave epochs out")
        self.place = {"epoch": epoch, "first": first, "generator": torch.zeros(0)}

    def filled(self, step: int) -> int:
        return self._window // 2

    def _read(self, index: int) -> tuple[int, Any]:
        return index, super()._read(index)
