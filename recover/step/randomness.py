"""Whose draws are whose: every slot has seeds of its own, and the user's generators are left as they were found.

What a slot draws follows from (seed, step, slot, rank of the replica, stage), so it is the same on whatever replica of
this shape computes it. Ranks of one replica have other rows, or other layers, and draw otherwise; a sample is the same
for all of them, so reading it draws alike. Covered are torch's generators (CPU and CUDA), Python's and numpy's.
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
    """The global generators, as far as a step has to do with them."""

    def __init__(self, seed: int, shard: int) -> None:
        self._seed, self._shard = seed, shard

    def read(self, step: int, slot: int) -> None:
        """A sample is about to be read, by every rank of the replica alike."""
        self._start("read", step, slot)

    def sample(self, index: int) -> None:
        """A microbatch is about to be read by its number in a stream that knows of no step."""
        self._start("sample", index)

    def in_order(self, index: int) -> None:
        """The items of a microbatch are about to be read, of something that can only be read in order."""
        self._start("in-order", index)

    def compute(self, step: int, slot: int, stage: int = 0) -> None:
        """This rank is about to compute its part of a microbatch."""
        self._start("compute", step, slot, self._shard, stage)

    def update(self, step: int) -> None:
        """The optimizer is about to run: if it draws, then alike on all replicas."""
        self._start("update", step, self._shard)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Whatever is drawn inside, the user's own draws go on afterwards as if nothing had been."""
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
            elif torch.cuda.is_initialized():  # since then: what the user's torch.manual_seed had asked for
                torch.cuda.manual_seed_all(first_seed)

    def _start(self, *place: object) -> None:
        text = "/".join(map(str, (self._seed, *place)))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():  # not so in a fork, which has the generators and may not use them
            for generator in torch.cuda.default_generators:
                generator.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number % 2**32)


def generators(device: torch.device) -> dict[str, Any]:
    """The state of the global generators as the user's code will go on drawing from them; `device`: the model's."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state(_cuda(device))
    return state


def set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing where another replica is. Its GPU may have another number than this rank's."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"], _cuda(device))


def _cuda(device: torch.device) -> torch.device:
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
