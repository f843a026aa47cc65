"""A host on the etcd fabric, without MPI: a tiny agent that forks its ranks, sees them end, and declares them dead.

Argument: a JSON object with `endpoint`, `prefix`, `name` (of this host), `ranks` (of this host), `size`, `carrier`
("gloo": the whole World; "": Membership alone, without data), `replica_size`, `directory`, `ttl`, `grace`, `patience`,
`pace` (seconds of work in a step), `address` (of this host). The ranks reduce, vote and repair until there is a file
`stop` in the directory, and write down the decisions that they received.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.world import rank_exit
from recover.world.census import Census
from recover.world.fabrics.etcd.agreement import declare
from recover.world.fabrics.etcd.client import EtcdClient, UnansweredError
from recover.world.fabrics.etcd.fabric import DeclaredDeadError, EtcdFabric
from recover.world.fabrics.etcd.host_lease import HostLease
from recover.world.liveness.board import Board
from recover.world.membership import ExcludedError, Membership

scenario = json.loads(sys.argv[1])
SIZE, DIRECTORY, CARRIER = scenario["size"], Path(scenario["directory"]), scenario["carrier"]
if CARRIER:  # once, before the forks
    import torch

    import recover.world.carriers.gloo
    import recover.world.world  # noqa: F401

    torch.set_num_threads(1)


def client() -> EtcdClient:
    return EtcdClient(
        scenario["endpoint"], prefix=scenario["prefix"], patience=scenario["patience"], token="secret"
    )


class NoCarrier:
    """A carrier that carries nothing, for ranks without data."""

    def offer(self) -> bytes:
        return b"nothing"

    def build(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        assert set(offers.values()) == {b"nothing"}

    def free(self) -> None:
        pass


class NoCarriers:
    settle = 0.0

    def make(self, members: tuple[int, ...]) -> NoCarrier:
        return NoCarrier()


def join(fabric: EtcdFabric, board: Board) -> tuple[Any, Census]:
    grid = Grid.of(SIZE, scenario["replica_size"])
    if not CARRIER:
        membership = Membership(fabric, grid, NoCarriers(), lambda *place: None, rank_exit.log)
        return membership, membership.repair(b"")
    from recover.world.carriers.gloo import GlooCarriers
    from recover.world.carriers.worker import Worker
    from recover.world.hooks import NoHooks
    from recover.world.interfaces import WorldParts
    from recover.world.slot_notes import RunNotes
    from recover.world.world import World

    worker = Worker()
    parts = WorldParts(
        fabric=fabric,
        liveness=board,
        hooks=NoHooks(),
        worker=worker,
        carriers=GlooCarriers(fabric, grid, worker, token="secret"),
        own=rank_exit.RANK_EXIT,
        notes=RunNotes(str(DIRECTORY), fabric.rank),
        watch=lambda watcher: watcher.start(),
    )
    world = World(JobSpec(SIZE, grid.replica_size, "gloo", run_dir=str(DIRECTORY)), grid, parts)
    return world, world.last_census


def reduced(world: Any) -> bool:
    """Whether the data came through, and were right."""
    if not CARRIER:
        time.sleep(scenario["pace"])
        return True
    mine = np.full(50_000, 2.0**world.rank, np.float64)
    total = np.empty_like(mine)
    complete = world.cross.all_reduce(mine, total).wait()
    assert not complete or (total == sum(2.0**rank for rank in world.cross.peers)).all()
    return bool(complete)


def run_rank(rank: int) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    os.environ |= {"OMPI_COMM_WORLD_RANK": str(rank), "RECOVER_RUN_DIR": str(DIRECTORY)}
    rank_exit.install_hooks(standalone=True)
    diary = os.open(DIRECTORY / f"diary-{rank}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(kind: str, **facts: object) -> None:
        told = {"number": fabric.agreed.number, "decision": fabric.agreed.value.decode()}
        os.write(diary, (json.dumps({"kind": kind, "at": time.time(), **told, **facts}) + "\n").encode())

    board = Board(DIRECTORY / f"board-{scenario['name']}", SIZE)
    board.claim(rank)
    fabric = EtcdFabric(
        client(),
        rank,
        SIZE,
        board,
        "secret",
        scenario["name"],
        grace=scenario["grace"],
        replica_size=scenario["replica_size"],
        address=scenario["address"],
    )
    step = 0
    try:
        world, census = join(fabric, board)
        note("census", epoch=census.epoch, members=census.members, pid=os.getpid())
        while True:
            word = world.agree(reduced(world) | (not (DIRECTORY / "stop").exists()) << 1)
            if word is None or not word & 1:
                census = world.repair(b"%d" % step)
                note("census", epoch=census.epoch, members=census.members, pid=os.getpid())
                continue
            step += 1
            note("commit", step=step, epoch=world.epoch)
            if not word & 2:
                break
    except ExcludedError as excluded:
        rank_exit.die(rank_exit.End.EXCLUDED, str(excluded))
    except DeclaredDeadError as declared:  # a `World` ends by itself
        rank_exit.die(rank_exit.End.FENCED, str(declared))
    except BaseException as error:
        rank_exit.die_of_exception(error)
    rank_exit.succeed()


def main() -> None:
    ranks = {}
    for rank in scenario["ranks"]:
        pid = os.fork()
        if not pid:
            run_rank(rank)
        ranks[os.pidfd_open(pid)] = (rank, pid)
    etcd = client()
    lease = HostLease(etcd, scenario["name"], scenario["ranks"], scenario["ttl"], lost=lambda: os._exit(3))
    lease.start()
    poll = select.poll()
    for descriptor in ranks:
        poll.register(descriptor, select.POLLIN)
    while ranks:
        for descriptor, _ in poll.poll():
            rank, pid = ranks.pop(descriptor)
            poll.unregister(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                declare(etcd, rank, f"its process ended with {code}")
    lease.leave()


if __name__ == "__main__":
    try:
        main()
    except UnansweredError:
        sys.exit(4)  # cut off, and so are its ranks
