"""The paper's two primitives: `ulfm_allreduce` (detect, repair, record, reduce) and
`ulfm_consensus` (its first three).

Detect is one agreement over the whole world, not over the group: with several shards per
replica, a verdict per group can tear healthy replicas apart. So every rank of the world must
make the same sequence of these calls, as it does when all shards of all replicas run the same
step.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch.distributed import Work as TorchWork

from recover.policy.roles import Role
from recover.world.carriers.worker import Worker
from recover.world.world import World


@dataclass(frozen=True)
class FailureRecord:
    """The result of a repair, the same on every survivor."""

    failed_ranks: tuple[int, ...]
    role_counts: Mapping[Role, int]  # of the survivors, after promotion
    contributions: int  # microbatches that the survivors have finished in this step
    at_boundary: bool  # there were too few spares to replace the dead
    epoch: int


class WorkULFM(TorchWork):
    """A collective under way, and its result. Failures are recorded here and never thrown
    into a future."""

    def __init__(self, tensors: list[torch.Tensor], raises: bool = False) -> None:
        super().__init__()
        self.record: FailureRecord | None = None
        self.error: BaseException | None = None
        self._tensors = tensors
        self._raises = raises
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def has_failures(self) -> bool:
        """Whether the operation was not performed, or not everywhere."""
        return self.record is not None or self.error is not None

    def get_failed_ranks(self) -> tuple[int, ...]:
        """The ranks that died, as agreed. Empty while only this rank has seen an error: the next call
        agrees on it."""
        return self.record.failed_ranks if self.record else ()

    @property
    def role_counts(self) -> Mapping[Role, int]:
        return self.record.role_counts if self.record else {}

    @property
    def contributions(self) -> int | None:
        return self.record.contributions if self.record else None

    @property
    def at_boundary(self) -> bool:
        return self.record is not None and self.record.at_boundary

    def finish(self) -> None:
        self._future.set_result(self._tensors)

    # The interface of torch's Work.

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        if self._raises and self.has_failures():
            raise RuntimeError(self.explanation())
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and not self.has_failures()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def explanation(self) -> str:
        if self.record is None:
            return f"a collective on backend 'ulfm' failed on this rank: {self.error}"
        lost = ", ".join(map(str, self.record.failed_ranks))
        return (
            f"ranks {lost} died and the world was repaired (epoch {self.record.epoch}), so this collective was not "
            "performed; use recover.Step, or recover.dropin's primitives, which tell of failures in the work"
        )


class Control:
    """One per world: the thread on which these collectives run in order, and the roles that all
    ranks agree on."""

    _instances: ClassVar[dict[int, Control]] = {}

    def __init__(self, world: World) -> None:
        self.world = world
        self.roles: dict[int, Role] = dict.fromkeys(world.replicas, Role.MAJOR)
        self.contributed = 0
        self.quiesced = False
        self._thread = Worker()

    @classmethod
    def of(cls, world: World) -> Control:
        if id(world) not in cls._instances:
            cls._instances[id(world)] = cls(world)
        return cls._instances[id(world)]

    @property
    def role(self) -> Role:
        return self.roles[self.world.replica]

    def submit(self, work: WorkULFM, operation: Callable[[], bool] | None) -> WorkULFM:
        """Run detect, repair and record, and if no rank has died, the operation."""

        def task() -> None:
            try:
                if not self.quiesced:
                    work.record = self._detect()
                    if work.record is None and operation is not None and not operation():
                        work.error = self.world.cross.error
            except BaseException as error:
                work.error = error
                raise
            finally:
                work.finish()

        self._thread.post(task)
        return work

    def _detect(self) -> FailureRecord | None:
        if self.world.agree(1) is not None:
            return None
        census = self.world.repair(struct.pack("<q", self.contributed))
        grid = self.world.grid
        dead = Counter(self.roles.pop(replica) for replica in grid.replicas_of(census.lost))
        at_boundary = self._promote(dead)
        contributed = {
            grid.replica(rank): struct.unpack("<q", record)[0] for rank, record in census.records.items()
        }
        return FailureRecord(
            failed_ranks=census.lost,
            role_counts=Counter(self.roles.values()),
            contributions=sum(contributed.values()),
            at_boundary=at_boundary,
            epoch=census.epoch,
        )

    def _promote(self, dead: Counter[Role]) -> bool:
        """Spares step into the places of the dead, the lowest first. True, and no promotion, if
        there are too few."""
        if dead[Role.BOUNDARY_MINOR]:
            return True  # in the middle of a boundary step: there is no spare of that kind
        promoted = []
        for role, spare in ((Role.MAJOR, Role.MAJOR_SPARE), (Role.MINOR, Role.MINOR_SPARE)):
            spares = sorted(replica for replica, theirs in self.roles.items() if theirs is spare)
            if dead[role] > len(spares):
                return True
            promoted += [(replica, role) for replica in spares[: dead[role]]]
        self.roles.update(promoted)
        return False


class ControlledGroup(Protocol):
    """The part of a process group that the primitives use: `ProcessGroupULFM` has it."""

    control: Control
    at_boundary: bool


def ulfm_allreduce(tensor: torch.Tensor, group: ControlledGroup) -> WorkULFM:
    """Sum `tensor` in place over the cross-replica group; a spare's is zeroed first, unless at a
    boundary.

    If a rank has died since the last call, every survivor's work carries the same failure record
    and nothing is reduced. If a rank dies during the reduction, the works of some survivors report
    it and those of others do not; the next call brings them together. While the group is quiesced,
    nothing is done.
    """
    return _allreduce(tensor, group, WorkULFM([tensor]))


def ulfm_consensus(group: ControlledGroup) -> WorkULFM:
    """Detect, repair and record without moving data: after it, all survivors have seen the same
    failures."""
    return group.control.submit(WorkULFM([]), None)


def _allreduce(tensor: torch.Tensor, group: ControlledGroup, work: WorkULFM) -> WorkULFM:
    control = group.control

    def reduce() -> bool:
        if control.role.is_spare and not group.at_boundary:
            tensor.zero_()
        return control.world.cross.all_reduce(tensor).wait()

    return control.submit(work, reduce)
