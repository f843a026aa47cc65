"""Data: one loader of torchtitan for each slot of a step, with `dp_rank` the slot and `dp_world_size`
B (times the data-parallel ranks of a replica).

Slot s of step t is batch t of loader s, whichever replica computes it. A replica opens the loaders
of its slots. All replicas hold the states of all loaders as of one step, exchanged every few steps
and before each checkpoint: any of them can open any loader near its position.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader

from recover.integrations.gathering import gather
from recover.world.world import World

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass
class _Open:
    """An open loader, the number of steps that were read from it, and the batches of the last one."""

    loader: ParallelAwareDataloader
    batches: Iterator[Batch]
    read: int
    last: list[Batch]


class SlotLoaders(BaseDataLoader):
    """A stream by number for `step.microbatches`; in checkpoints, a data loader of torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        each: BaseDataLoader.Config
        """The config of one loader"""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, snapshot_every_n_steps: Any, **given: Any
    ) -> None:
        self._config, self._given = config.each, given
        self._ranks, self._rank = dp_world_size, dp_rank
        self._open: dict[int, _Open] = {}
        # The states of all loaders after step `position`, the same on all replicas; none: from the
        # beginning of the data.
        self.shared: dict[str, Any] = {"position": 0, "states": {}}
        self.serve(1, 1, 1)

    def serve(self, slots: int, batches: int, every: int) -> None:
        """slots: B; batches: of a slot, more than one for a pipeline; every: steps between two exchanges."""
        self._slots, self._batches, self.every = slots, batches, every
        self.loaders = slots * self._ranks
        numbers = range(self._rank, self.loaders, self._ranks)
        self._keys = [f"dp_rank_{number}" for number in numbers]  # of this rank's loaders, by slot

    def __iter__(self) -> Iterator[Batch]:
        return iter(())  # torchtitan asks for one; microbatches are read by number

    def __getitem__(self, number: int) -> list[Batch]:
        """The batches of microbatch `number` of the run."""
        step, slot = divmod(number, self._slots)
        # A slot may be asked for again, and the trainer changes the dicts.
        return [(dict(inputs), labels) for inputs, labels in self._after(step + 1, slot).last]

    def state_dict(self) -> dict[str, Any]:
        return {**dict.fromkeys(self._keys, b""), **self.shared["states"], "world_size": self.loaders}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shared["states"] = {key: state_dict[key] for key in self._keys}

    def exchange(self, world: World, step: int) -> None:
        """Give all replicas the states after `step`, the last committed one. All of them call it; a
        loader whose replica has died is opened by another one."""
        while self.shared["position"] < step:
            states = {
                self._keys[slot]: base64.b64encode(each.loader.state_dict()[self._keys[slot]]).decode()
                for slot, each in self._open.items()
                if each.read == step
            }
            for theirs in gather(world, json.dumps(states).encode()):
                states |= json.loads(theirs)
            missing = [slot for slot, key in enumerate(self._keys) if key not in states]
            for count, slot in enumerate(missing):
                if world.replicas[count % len(world.replicas)] == world.replica:
                    self._after(step, slot)
            if not missing:
                decoded = {key: base64.b64decode(states[key]) for key in self._keys}
                self.shared.update(position=step, states=decoded)
        self._open = {slot: each for slot, each in self._open.items() if each.read == step}

    def _after(self, step: int, slot: int) -> _Open:
        """The loader of a slot, after `step` steps."""
        each, position = self._open.get(slot), self.shared["position"]
        if each is None or not position <= each.read <= step:
            loader = self._make(self._keys[slot])
            each = self._open[slot] = _Open(loader, iter(loader), position, [])
        while each.read < step:
            try:
                each.last = [next(each.batches) for _ in range(self._batches)]
            except StopIteration:
                raise RuntimeError(
                    f"the data of slot {slot} have ended in step {each.read + 1}; give a loader that begins again "
                    "(--dataloader.infinite), or fewer --training.steps"
                ) from None
            each.read += 1
        return each

    def _make(self, key: str) -> BaseDataLoader:
        loader: ParallelAwareDataloader = self._config.build(
            dp_world_size=self.loaders,
            dp_rank=int(key.removeprefix("dp_rank_")),
            snapshot_every_n_steps=self.every * self._batches,
            **self._given,
        )
        if state := self.shared["states"].get(key):
            loader.load_state_dict({key: state, "world_size": self.loaders})
        return loader
