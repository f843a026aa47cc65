"""Model and optimizer on disk: each rank of a replica writes its parts into one safetensors file.

Parts have the names of the whole model and their offsets in the whole tensor, so any grid can
read them back by slices. Values that are not tensors are JSON in the header of the file. Nothing
in a file can run code: pickle is never used, and only files that the checkpoint lists are
opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from recover.checkpoint.directory import CheckpointError, file_digest
from recover.checkpoint.optimizer_state import load_state, named_state
from recover.gradients.optimizers import optimizers_of
from recover.job.record_files import FILES
from recover.parallel import plain_name
from recover.parallel.gathering import gather_json
from recover.step.joining.packing import NamedTensors, NotPackableError, pack, unpack

CONTENTS = "contents"  # header entry: positions of the tensors, and values that are not tensors
# Prefix of tensors inside of a value, such as a list in an optimizer's state: the value refers to
# them.
NESTED = "nested."


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one rank holds: a block of it, or all."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the block in the whole tensor
    tensor: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> Part:
        tensor = tensor.detach()
        chunks = getattr(tensor, "__create_chunk_list__", None)  # a DTensor knows its local block
        if chunks is None:
            return Part(tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        offsets = tuple(chunks()[0].offsets)
        return Part(tuple(tensor.shape), offsets, tensor.to_local())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Snapshot:
    """Copies of a rank's parts, which training does not change."""

    parts: dict[str, Part]
    values: dict[str, Any]
    parameters: list[str]

    @property
    def nbytes(self) -> int:
        return sum(part.tensor.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class Written:
    """The files of all ranks of the replica."""

    files: dict[str, str]  # by name, the SHA-256 of each
    parameters: list[str]  # the names of all parameters


class Tensors:
    """Model and optimizer, or optimizers, of one rank of a replica."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, replica_size: int) -> None:
        from recover.parallel.torch_world import TIMEOUT

        self._model, self._optimizers = model, optimizers_of(optimizer)
        # Parameters of FSDP1 are flat pieces of others, which only torch can name.
        self._is_flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        # A group of its own: the saving thread uses it while the replica computes with other
        # groups.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if replica_size > 1 else None

    def snapshot(self, beside: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Snapshot:
        """Copy the tensors of this rank, and those of `beside`."""
        tensors, values = self._state()
        tensors |= beside
        return Snapshot(
            {name: _copy(Part.of(tensor)) for name, tensor in tensors.items()},
            values,
            [f"model.{plain_name(name)}" for name, _ in self._model.named_parameters()],
        )

    def refuse_unsavable(self) -> None:
        """Raises CheckpointError with the name of an entry of model or optimizer that no file
        can hold."""
        self._state()

    def write(self, directory: Path, snapshot: Snapshot) -> Written:
        """Write this rank's file. All ranks of the replica call it; it fails on all of them, or
        on none."""
        rank = 0 if self._group is None else dist.get_rank(self._group)
        path = directory / f"part-{rank}.safetensors"
        held = self._gather({name: list(part.offsets) for name, part in snapshot.parts.items()})
        mine = {
            name: part
            for name, part in snapshot.parts.items()  # a block that several ranks hold is written by the first of them
            if (part.tensor.numel() or 0 in part.shape)
            and not any(parts.get(name) == list(part.offsets) for parts in held[:rank])
        }
        digest = failure = ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _write(path, mine, snapshot.values)
            digest = file_digest(path)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            FILES.remove(path)  # half a file takes room, too
        written = self._gather((path.name, digest, failure, snapshot.parameters))
        if failures := [failure for _, _, failure, _ in written if failure]:
            raise CheckpointError(failures[0])
        names = {name for *_, parameters in written for name in parameters}
        return Written({name: digest for name, digest, *_ in written}, sorted(names))

    def load(self, directory: Path, files: Iterable[str]) -> None:
        """Fill model and optimizer from files that any grid has written."""
        with Stored(directory, files) as stored:
            if self._is_flat:
                self._load_flat(stored)
                return
            weights = get_model_state_dict(self._model)
            for name, value in weights.items():
                if isinstance(value, torch.Tensor):
                    stored.fill(f"model.{name}", Part.of(value))
                else:
                    weights[name] = stored.value(f"model.{name}", value)
            set_model_state_dict(self._model, weights)
            for optimizer in self._optimizers:
                load_state(self._model, optimizer, stored, "optimizer.")

    def _load_flat(self, stored: Stored) -> None:
        tensors, values = self._state()
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(NESTED)}
        for name, tensor in tensors.items():
            stored.fill(name, Part.of(tensor))
        for name, value in values.items():
            values[name] = stored.value(name, value)
        both: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        for name, value in {**tensors, **values}.items():
            kind, _, rest = name.partition(".")
            both[kind][rest] = value
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=both["model"],
            optim_state_dict=both["optimizer"],
            options=_options(),
        )

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's tensors and other values, under the names of the whole model."""
        weights: Mapping[str, Any]
        moments: dict[str, Any]
        if self._is_flat:
            weights, moments = get_state_dict(self._model, self._optimizers, options=_options())
        else:
            weights = get_model_state_dict(self._model)
            # Under the names of parameters, each of which one optimizer holds.
            moments = {}
            for optimizer in self._optimizers:
                moments |= named_state(self._model, optimizer)
        state: dict[str, Any] = {f"model.{name}": value for name, value in weights.items()}
        state |= {f"optimizer.{name}": value for name, value in moments.items()}
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        nested = NamedTensors()
        values: dict[str, Any] = {}
        for name, value in state.items():
            if name not in tensors:
                try:
                    values[name] = pack(_plain(name, value), NESTED + name, nested)
                except NotPackableError as error:
                    raise CheckpointError(str(error).removeprefix(NESTED)) from None
        if sharded := [name for name, value in nested.items() if hasattr(value, "device_mesh")]:
            raise CheckpointError(
                f"{sharded[0].removeprefix(NESTED)} is a sharded tensor inside of a list; a checkpoint holds sharded "
                "tensors that lie in dicts alone"
            )
        return tensors | nested, values

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks of the replica."""
        return [value] if self._group is None else gather_json(value, self._group)


class Stored:
    """The files of a checkpoint, read by slices."""

    def __init__(self, directory: Path, files: Iterable[str]) -> None:
        self._directory = directory
        self._parts: dict[str, list[tuple[Any, tuple[int, ...]]]] = {}  # file and offsets
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, Any] = {}
        for name in files:
            if Path(name).name != name:
                raise CheckpointError(f"{directory} lists a file outside of itself: {name!r}; do not use it")
            try:
                file = safe_open(str(directory / name), framework="pt")
                header = _contents(file.metadata())
                self._values |= header["values"]
                for tensor, (shape, offsets) in header["parts"].items():
                    self._parts.setdefault(tensor, []).append((file, tuple(offsets)))
                    self._shapes[tensor] = tuple(shape)
            except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{directory / name} cannot be read: {error}") from None

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.clear()  # unmaps the files

    def names(self, prefix: str) -> list[str]:
        return [name for name in (*self._parts, *self._values) if name.startswith(prefix)]

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of a tensor; None for other values."""
        if name not in self._parts:
            return None
        (file, _), *_ = self._parts[name]
        shape = self._shapes[name]
        alone = not shape or 0 in shape
        first = file.get_tensor(name) if alone else file.get_slice(name)[(slice(0, 1),) * len(shape)]
        return shape, first.dtype

    def load(self, name: str, into: torch.Tensor) -> torch.Tensor:
        self.fill(name, Part.of(into))
        return into

    def fill(self, name: str, part: Part) -> None:
        """Fill this part from all blocks that overlap it."""
        if 0 in part.shape:
            return  # older files do not list empty tensors
        if name not in self._parts:
            raise CheckpointError(f"{self._directory} has no {name}; it is a checkpoint of another model")
        if self._shapes[name] != part.shape:
            raise CheckpointError(
                f"{name} is {list(self._shapes[name])} in {self._directory}, and {list(part.shape)} in the model; "
                "give the model that it was made with"
            )
        missing = part.tensor.numel()
        for file, offsets in self._parts[name]:
            block = file.get_slice(name)
            starts = [max(a, b) for a, b in zip(offsets, part.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(
                    offsets, block.get_shape(), part.offsets, part.tensor.shape, strict=True
                )
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            there = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, offsets, strict=True))
            here = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, part.offsets, strict=True))
            found = block[there] if there else file.get_tensor(name)
            if found.dtype != part.tensor.dtype:
                raise CheckpointError(
                    f"{name} is {found.dtype} in {self._directory} and {part.tensor.dtype} here"
                )
            part.tensor[here].copy_(found)
            missing -= found.numel()
        if missing:
            raise CheckpointError(f"{self._directory} lacks {missing} numbers of {name}; it is not whole")

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, from all of its parts."""
        kind = self.kind(name)
        if kind is None:
            raise CheckpointError(f"{self._directory} has no {name}")
        shape, dtype = kind
        tensor = torch.empty(shape, dtype=dtype)
        self.fill(name, Part(shape, (0,) * len(shape), tensor))
        return tensor

    def value(self, name: str, current: Any) -> Any:
        """A value that is not a tensor. Older files have lists instead of tuples."""
        if name not in self._values:
            raise CheckpointError(f"{self._directory} has no {name}; it is a checkpoint of another optimizer")
        value = unpack(self._values[name], self.whole)
        return tuple(value) if isinstance(current, tuple) else value


def _copy(part: Part) -> Part:
    return Part(part.shape, part.offsets, part.tensor.to("cpu", copy=True).contiguous())


def _write(path: Path, parts: Mapping[str, Part], values: Mapping[str, Any]) -> None:
    where = {name: (part.shape, part.offsets) for name, part in parts.items()}
    # Under one name: safetensors writes several names in any order, and equal contents must have
    # equal digests.
    header = {CONTENTS: json.dumps({"parts": where, "values": values})}
    save_file({name: part.tensor for name, part in parts.items()}, path, metadata=header)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _plain(name: str, value: Any) -> Any:
    """Options of a group that are tuples of numbers are lists in the files; `Stored.value` makes
    them tuples again."""
    is_option = name.startswith("optimizer.param_groups.") and type(value) is tuple
    return list(value) if is_option and all(isinstance(each, bool | int | float) for each in value) else value


def _contents(header: Mapping[str, str]) -> dict[str, Any]:
    """The contents of a file; older files have them under two names."""
    if CONTENTS in header:
        return dict(json.loads(header[CONTENTS]))
    return {name: json.loads(header[name]) for name in ("parts", "values")}


def _options() -> StateDictOptions:
    """State by parameter, not by group: a rank of a pipeline has only some parameters of a
    group."""
    return StateDictOptions(flatten_optimizer_state_dict=True)
