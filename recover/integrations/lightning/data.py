"""Data: batches of the user's DataLoader by number, in the order in which the loader itself reads them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from recover.data.readers import Readers
from recover.step.randomness import Randomness, generators, set_generators

_CPU = torch.device("cpu")


class _Numbers:
    def __getitem__(self, item: Any) -> Any:
        return item


class _Key(int):
    """Number of a microbatch with its epoch, so that keys of two epochs differ. Workers receive the items with it."""

    items: Any
    sample: int


class StepNumber(int):
    """The `batch` that callbacks receive: the number of the step in the epoch."""


class Epochs:
    """A stream for `step.microbatches`: of one epoch at a time, whose order is drawn as the loader draws it."""

    def __init__(self, loader: Any, global_batch: int, drop_remainder: bool, seed: int) -> None:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            kind = type(getattr(loader, "dataset", loader)).__name__
            raise ValueError(
                f"Lightning on ReCoVer: any replica must be able to read any batch, and {kind} is read in order; give "
                "one DataLoader over a dataset with __len__ and __getitem__, or use recover.Step in a loop of your own"
            )
        if loader.worker_init_fn is not None:
            raise ValueError(
                "Lightning on ReCoVer: batches are read by processes of ReCoVer's (worker_init_fn is given); prepare "
                "the dataset in its __getitem__, when it is called first"
            )
        rest = len(loader) % global_batch
        if not len(loader) // global_batch or (rest and not drop_remainder):
            raise ValueError(
                f"Lightning on ReCoVer: an epoch has {len(loader)} batches, and steps of exactly {global_batch} "
                f"(global_batch) leave {rest} of them; choose another batch size, or leave so many out of each epoch: "
                "RecoverStrategy(drop_remainder=True), for at least one whole step"
            )
        self.loader, self.steps = loader, len(loader) // global_batch
        self.first, self.order, self.digest, self.drawn_from = 0, list[Any](), 0, dict[str, Any]()
        self._epoch, self._randomness = 0, Randomness(seed, shard=0)
        self._readers = Readers(self._read, self._read_here, loader.num_workers)
        inner = getattr(loader.batch_sampler, "sampler", None)
        self.samplers = [each for each in (loader.sampler, loader.batch_sampler, inner) if each is not None]
        owned = [getattr(each, "generator", None) for each in (loader, *self.samplers)]
        self._generators = list(
            {id(each): each for each in owned if isinstance(each, torch.Generator)}.values()
        )

    def drawing(self) -> Iterator[Any]:
        """Begin to draw an order, as iter(loader) does."""
        loader, same = self.loader, {"collate_fn": _same, "generator": self.loader.generator}
        if loader.batch_sampler is None:
            return iter(DataLoader(_Numbers(), batch_size=None, sampler=loader.sampler, **same))  # type: ignore[arg-type]
        return iter(DataLoader(_Numbers(), batch_sampler=loader.batch_sampler, **same))  # type: ignore[arg-type]

    def draw(self, drawing: Iterator[Any], first: int) -> None:
        """Draw the order of an epoch; `first`: the number of its first microbatch in the run."""
        self.drawn_from = {**random_state(), "own": [each.get_state() for each in self._generators]}
        self._take(list(drawing), first)

    def draw_again(self, state: Mapping[str, Any]) -> None:
        """Draw the order again that another replica, or this run before a checkpoint, drew from generators in this
        state."""
        with self._randomness.apart():
            kept = [each.get_state() for each in self._generators]
            set_generators(state["drawn_from"], _CPU)
            for each, own in zip(self._generators, state["drawn_from"]["own"], strict=True):
                each.set_state(own)
            order = self.loader.batch_sampler or self.loader.sampler
            self._take(list(order), state["first"])
            for each, own in zip(self._generators, kept, strict=True):
                each.set_state(own)
        self.drawn_from = dict(state["drawn_from"])
        if self.digest != state["digest"]:
            raise RuntimeError(
                "Lightning on ReCoVer: the sampler draws another order than the one in use, from the same state of "
                "the global generators; let it draw from them, or from a generator= that the DataLoader has, too"
            )

    def state(self) -> dict[str, Any]:
        return {"drawn_from": self.drawn_from, "digest": self.digest, "first": self.first}

    def _take(self, order: list[Any], first: int) -> None:
        self.order, self.first, self._epoch = order, first, self._epoch + 1
        self.digest = 0
        for items in order:
            self.digest = zlib.crc32(repr(items).encode(), self.digest)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        """The number of a microbatch in its epoch, and the batch."""
        key = self._key(number)
        return number - self.first, self._readers.get(key)

    def expect(self, coming: Sequence[int], kept: range) -> None:
        """Called by a step: announces the microbatches that this replica will ask for."""
        self._readers.announce([self._key(each) for each in coming if each - self.first < len(self.order)])

    def _key(self, number: int) -> _Key:
        key = _Key(number + (self._epoch << 48))
        key.items, key.sample = self.order[number - self.first], number
        return key

    def _read_here(self, key: int) -> Any:
        with self._randomness.apart():
            return self._read(key)

    def _read(self, key: Any) -> Any:
        self._randomness.sample(key.sample)
        dataset, collate = self.loader.dataset, self.loader.collate_fn
        if self.loader.batch_sampler is None:
            return collate(dataset[key.items])
        if hasattr(dataset, "__getitems__"):
            return collate(dataset.__getitems__(key.items))
        return collate([dataset[item] for item in key.items])


class Steps:
    """Takes the place of the DataLoader in the trainer: one number for each step of an epoch."""

    def __init__(self, strategy: Any) -> None:
        self._strategy, self._data, loader = strategy, strategy.data, strategy.data.loader
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler  # for set_epoch

    def __len__(self) -> int:
        return int(self._data.steps)

    def __iter__(self) -> Iterator[StepNumber]:
        return self._numbers(self._data.drawing())

    def _numbers(self, drawing: Iterator[Any]) -> Iterator[StepNumber]:
        self._strategy.begin_epoch(drawing)
        progress = self._strategy.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
        while progress.current.ready < len(self):
            yield StepNumber(progress.current.ready)

    def state_dict(self) -> dict[str, Any]:
        return {}  # Lightning warns of loaders without it, which cannot resume inside an epoch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def random_state() -> dict[str, Any]:
    """The global generators, in types that torch.load takes with weights_only."""
    state = generators(_CPU)
    name, words, *rest = state["numpy"]
    return {**state, "numpy": (name, words.tolist(), *rest)}


def _same(items: Any) -> Any:
    return items
