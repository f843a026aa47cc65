"""`ProcessGroupULFM`: torch backend "ulfm", the cross-replica group behind torch's own interface.

It stands for one group only: the ranks that hold this rank's shard in every replica (with one rank
per replica, the whole world). Everything inside a replica stays on gloo or NCCL, in groups that do
not span replicas.

Torch's own callers (`dist.all_reduce`, a stock DDP) know nothing of failures. For them the first
failure quiesces the group and the next call raises, so that no script trains on gradients that were
not reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from recover.dropin.primitives import Control, WorkULFM, _allreduce
from recover.launch.init import init
from recover.policy.roles import Role
from recover.world.world import World

_LOCAL_OPERATIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
}


class ProcessGroupULFM(dist.ProcessGroup):
    """A view of the world's cross group; all views share one order of operations."""

    def __init__(self, world: World) -> None:
        super().__init__(world.cross.index, world.cross.size)
        self.control = Control.of(world)
        self.at_boundary = False
        self._world = world
        self._failure: WorkULFM | None = None
        self._name = "ulfm"

    # The paper's control surface.

    def world_epoch(self) -> int:
        return self._world.epoch

    def set_quiesce(self, quiesce: bool) -> None:
        """Quiesce the group, or resume it. While quiesced, collectives are no-ops: after a failure their
        results would be thrown away."""
        self.control.quiesced = quiesce

    def set_roles(self, roles: Mapping[int, Role]) -> None:
        """Install the role of every living replica; the same mapping on all ranks."""
        missing = set(self._world.replicas) - set(roles)
        if missing:
            raise ValueError(f"replicas {sorted(missing)} have no role; give one to each living replica")
        self.control.roles = {replica: roles[replica] for replica in self._world.replicas}

    def set_contributed(self, microbatches: int) -> None:
        """Set how many microbatches this replica has finished in the step; sent to all survivors if a
        rank dies."""
        self.control.contributed = microbatches

    # The interface of torch's ProcessGroup.

    def rank(self) -> int:
        return self._world.cross.index

    def size(self) -> int:
        return self._world.cross.size

    def getBackendName(self) -> str:
        return "ulfm"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: Any, opts: Any = None) -> WorkULFM:
        tensor = tensors[0] if isinstance(tensors, list | tuple) else tensors
        kind = _kind(opts)
        if kind == dist.ReduceOp.SUM:
            self._refuse_after_failure()
            return self._watch(_allreduce(tensor, self, WorkULFM([tensor], raises=True)))

        def reduce() -> bool:
            if kind == dist.ReduceOp.AVG:
                done = self._world.cross.all_reduce(tensor).wait()
                tensor.div_(self.size())
                return done
            rows = torch.empty((self.size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            done = self._world.cross.all_gather(tensor.contiguous(), rows).wait()
            if done:
                tensor.copy_(_LOCAL_OPERATIONS[kind](rows))
            return done

        if kind != dist.ReduceOp.AVG and kind not in _LOCAL_OPERATIONS:
            raise NotImplementedError(
                f"backend 'ulfm' cannot reduce by {kind}; use SUM, AVG, MAX, MIN or PRODUCT"
            )
        return self._submit([tensor], reduce)

    def broadcast(self, tensors: Any, opts: Any = None) -> WorkULFM:
        tensor = tensors[0] if isinstance(tensors, list | tuple) else tensors
        root = getattr(opts, "rootRank", 0)
        return self._submit([tensor], lambda: self._world.cross.broadcast(tensor, root).wait())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> WorkULFM:
        rows, tensor = outputs[0], inputs[0]
        return self._submit(rows, lambda: self._gather(tensor, lambda i, row: rows[i].copy_(row)))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> WorkULFM:
        parts = output.view(self.size(), *tensor.shape)
        return self._submit([output], lambda: self._gather(tensor, lambda i, row: parts[i].copy_(row)))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> WorkULFM:
        def reduce() -> bool:
            total = tensor.clone()
            done = self._world.cross.all_reduce(total).wait()
            output.copy_(total.view(self.size(), *output.shape)[self.rank()])
            return done

        return self._submit([output], reduce)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, opts: Any = None) -> WorkULFM:
        return self._submit([], lambda: self._world.cross.barrier().wait())

    def _gather(self, tensor: torch.Tensor, place: Callable[[int, torch.Tensor], object]) -> bool:
        rows = torch.empty((self.size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        done = self._world.cross.all_gather(tensor.contiguous(), rows).wait()
        for index, row in enumerate(rows):
            place(index, row)
        return done

    def _submit(self, results: list[torch.Tensor], operation: Callable[[], bool]) -> WorkULFM:
        self._refuse_after_failure()
        return self._watch(self.control.submit(WorkULFM(results, raises=True), operation))

    def _watch(self, work: WorkULFM) -> WorkULFM:
        """Keep the first failure: callers of torch's interface may never read it from the work."""

        def check(_: object) -> None:
            if work.has_failures() and self._failure is None:
                self._failure = work
                self.control.quiesced = True

        work.get_future().add_done_callback(check)
        return work

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure.explanation())


def _kind(opts: Any) -> Any:
    kind = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    return getattr(kind, "op", kind)


def _create(options: Any, backend_options: Any) -> ProcessGroupULFM:
    """Called by torch for `init_process_group`, `new_group` and device meshes."""
    world = init()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(world.grid.ranks))
    mine = world.grid.peers(world.rank, range(world.grid.ranks))
    if ranks != mine:
        raise ValueError(
            f"backend 'ulfm' carries the cross-replica group {list(mine)} of this rank, not {list(ranks)}; "
            "use gloo or nccl inside a replica, and order a device mesh as (replica, shard)"
        )
    return ProcessGroupULFM(world)


if "ULFM" not in dist.Backend._plugins:
    dist.Backend.register_backend("ulfm", _create, extended_api=True, devices=["cpu", "cuda"])
