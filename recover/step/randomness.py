"""Random draws: every slot has seeds of its own, and the user's generators keep their state.

The draws of a slot follow from (seed, step, slot, rank in the replica, stage), so they are the
same on every replica of this shape. Ranks of one replica compute other rows or layers, and draw
differently; all of them read the same sample, so reading draws alike. Covers torch's generators
(CPU and CUDA), Python's and numpy's.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch


class Randomness:
    """Seeds the global generators."""

    def __init__(self, seed: int, shard: int) -> None:
        self._seed, self._shard = seed, shard

    def read(self, step: int, slot: int) -> None:
        """Seed for reading a sample: the same on every rank of the replica."""
        self._start("read", step, slot)

    def sample(self, index: int) -> None:
        """Seed for reading microbatch `index` of a stream outside of any step."""
        self._start("sample", index)

    def in_order(self, index: int) -> None:
        """Seed for reading the items of a microbatch of a dataset that can only be read in
        order."""
        self._start("in-order", index)

    def compute(self, step: int, slot: int, stage: int = 0) -> None:
        """Seed for computing this rank's part of a microbatch."""
        self._start("compute", step, slot, self._shard, stage)

    def update(self, step: int) -> None:
        """Seed for the optimizer: if it draws, all replicas draw alike."""
        self._start("update", step, self._shard)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Restore the user's generators afterwards, whatever was drawn inside."""
        with_cuda, first_seed = torch.cuda.is_initialized(), torch.initial_seed()
        ours = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        on_gpus = torch.cuda.get_rng_state_all() if with_cuda else []
        try:
            yield
        finally:
            torch.set_rng_state(ours[0])
            random.setstate(ours[1])
            numpy.random.set_state(ours[2])
            if with_cuda:
                torch.cuda.set_rng_state_all(on_gpus)
            elif torch.cuda.is_initialized():  # initialised inside: as the user's torch.manual_seed requested
                torch.cuda.manual_seed_all(first_seed)

    def _start(self, *place: object) -> None:
        text = "/".join(map(str, (self._seed, *place)))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():  # not in a fork, which has the generators and may not use them
            for generator in torch.cuda.default_generators:
                generator.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number % 2**32)


def generators(device: torch.device) -> dict[str, Any]:
    """The state of the global generators, for a joining replica; `device`: the model's."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state(_cuda(device))
    return state


def set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Continue with the generators of another replica. Its GPU may have another number than this
    rank's."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"], _cuda(device))


def _cuda(device: torch.device) -> torch.device:
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
