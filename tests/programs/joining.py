"""Ranks on the etcd fabric that train, die, and are joined by new ones; a tiny agent forks them on request.

Argument: a JSON object with `endpoint`, `prefix`, `directory`, `size`, `replica_size`, `kind` (plain, partitioned,
hsdp, pipeline, or grid: tp 2 x pp 2), `steps`, `batch`, `pace` (seconds that a microbatch takes, at least), `policy`,
`faults` (of all), `instalment` (bytes that are sent to a joining rank with each step; 0: all in one pause), and perhaps
`hang_limit`, `stuck` (joining ranks hang while they load the state) and `own_count` (each rank counts the steps that it
has taken itself, the first ones those since another has joined, which takes MORE than they do). Each line of its input
is a JSON list of ranks to start; those from `size` on join. A rank that does not end well is declared dead.
Every rank writes down what it committed. A file `stop` in the directory ends the run.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

import recover
from recover.faults.fault import parse_faults
from recover.faults.probe import Probe
from recover.gradients.parts import local_part
from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.parallel import rows
from recover.step.joining.instalments import InstalmentSize
from recover.train.models import Llama
from recover.world import rank_exit
from recover.world.carriers.gloo import GlooCarriers
from recover.world.carriers.worker import Worker
from recover.world.fabrics.etcd.agreement import declare
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.fabric import EtcdFabric
from recover.world.interfaces import WorldParts
from recover.world.liveness.board import Board
from recover.world.slot_notes import RunNotes
from recover.world.world import World

sys.path.insert(0, str(Path(__file__).parents[1]))
import toy
from toy_llama import CONFIG, Tokens

scenario = json.loads(sys.argv[1])
DIRECTORY, SIZE, KIND = Path(scenario["directory"]), scenario["size"], scenario["kind"]
HEAVY = recover.Step, recover.hsdp, recover.threed  # imported once, for all that are forked
CAPACITY = 1024  # of the board
MORE = 5  # steps
torch.set_num_threads(1)
if scenario["instalment"]:  # a small model, in several instalments all the same
    InstalmentSize.limit = lambda *_: scenario["instalment"]  # type: ignore[method-assign]


def client() -> EtcdClient:
    return EtcdClient(scenario["endpoint"], prefix=scenario["prefix"], token="secret")


def enter_world(rank: int) -> World:
    grid, worker = Grid.of(SIZE, scenario["replica_size"]), Worker()
    board = Board(DIRECTORY / "board", CAPACITY)
    board.claim(rank)
    fabric = EtcdFabric(
        client(),
        rank,
        SIZE,
        board,
        "secret",
        replica_size=grid.replica_size,
        admits=True,
    )
    parts = WorldParts(
        fabric=fabric,
        liveness=board,
        hooks=Probe(grid.replica(rank), grid.shard(rank), parse_faults(scenario["faults"])),
        worker=worker,
        carriers=GlooCarriers(fabric, grid, worker, token="secret"),
        own=rank_exit.RANK_EXIT,
        notes=RunNotes(str(DIRECTORY), rank),
        watch=lambda watcher: watcher.start(),
    )
    job = JobSpec(
        SIZE,
        grid.replica_size,
        "gloo",
        scenario.get("hang_limit"),
        run_dir=str(DIRECTORY),
        token="secret",
        joining=rank >= SIZE,
    )
    return World(job, grid, parts)


class Average:
    """A moving average of the loss, as an extra such as users keep."""

    def __init__(self) -> None:
        self.value, self.steps = torch.zeros(()), 0

    def see(self, loss: float) -> None:
        self.value, self.steps = self.value.lerp(torch.tensor(loss), 0.25), self.steps + 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if scenario.get("stuck"):
            time.sleep(1000)
        self.value, self.steps = state["value"], state["steps"]


def make_model(world: World) -> torch.nn.Module:
    torch.manual_seed(world.rank if world.outside else 3)  # whatever a joining rank has made is replaced
    if KIND in ("plain", "partitioned"):
        return toy.Model(dropout=0.1)
    if KIND == "hsdp":
        return recover.hsdp(Llama(CONFIG), world)
    return recover.threed(Llama(CONFIG), world, tp=2 if KIND == "grid" else 1, pp=2)


def run_step(step: recover.Step, model: Any, world: World) -> None:
    if KIND in ("pipeline", "grid"):
        for batches in step.rounds(Tokens()):
            time.sleep(scenario["pace"] * len(batches))
            step.backward(model(batches))
        return
    for sample in step.microbatches(toy.Stream() if KIND in ("plain", "partitioned") else Tokens()):
        time.sleep(scenario["pace"])
        loss = model(*rows(world, sample)) if KIND == "hsdp" else toy.loss_of(model, sample)
        step.backward(loss)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(local_part(t.detach()).numpy().tobytes() for t in tensors)).hexdigest()


def run_rank(rank: int) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    os.environ |= {"OMPI_COMM_WORLD_RANK": str(rank), "RECOVER_RUN_DIR": str(DIRECTORY)}
    rank_exit.install_hooks(standalone=True)
    diary = os.open(DIRECTORY / f"diary-{rank}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(kind: str, **facts: object) -> None:
        os.write(diary, (json.dumps({"kind": kind, "at": time.time(), **facts}) + "\n").encode())

    try:
        world = enter_world(rank)
        note("started", pid=os.getpid())
        model = make_model(world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        average = Average()
        step = recover.Step(
            world,
            model,
            optimizer,
            global_batch=scenario["batch"],
            policy=scenario["policy"],
            samples="partitioned" if KIND == "partitioned" else "exact",
            clip=1.0,
            scheduler=scheduler,
            reduction="reproducible",
            bucket_mb=0.02,
            buffers=toy.MEMORY if KIND in ("plain", "partitioned") else (),
            extra={"average": average},
            join="instalments" if scenario["instalment"] else "pause",
        )
        taken = 0 if rank < SIZE else -MORE
        while (taken if scenario.get("own_count") else step.index) < scenario[
            "steps"
        ] and not step.stop_agreed:
            taken += rank >= SIZE or any(
                replica * scenario["replica_size"] >= SIZE for replica in world.replicas
            )
            if (DIRECTORY / "stop").exists():
                step.request_stop()
            run_step(step, model, world)
            average.see(step.loss)
            step.on_first(note, "once", step=step.index)
            states = [state for held in optimizer.state.values() for state in held.values()]
            note(
                "commit",
                step=step.index,
                replicas=world.replicas,
                epoch=world.epoch,
                samples=step.all_samples,
                loss=step.loss,
                weight=step.weight,
                lr=scheduler.get_last_lr()[0],
                average=float(average.value),
                counted=average.steps,
                parameters=digest([*model.parameters(), *model.buffers()]),
                optimizer=digest(states),
                incidents=[
                    {
                        "kind": i.kind,
                        "dead": i.dead_ranks,
                        "joined": i.joined_ranks,
                        "bytes": i.transfer_bytes,
                        "transfer_ms": i.transfer_ms,
                        "stall_ms": i.stall_ms,
                        "warm_up_ms": i.warm_up_ms,
                        "repair_ms": i.repair_ms,
                        "steps": i.joining_steps,
                    }
                    for i in step.incidents
                ],
            )
    except BaseException as error:
        rank_exit.die_of_exception(error)
    rank_exit.succeed()


def main() -> None:
    poll, ranks, etcd = select.poll(), dict[int, tuple[int, int]](), client()
    poll.register(0, select.POLLIN)
    told = b""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in ranks:
                poll.unregister(descriptor)
                rank, pid = ranks.pop(descriptor)
                os.close(descriptor)
                if os.waitpid(pid, 0)[1]:
                    declare(etcd, rank, "its process has ended")
                continue
            told += (more := os.read(0, 4096))
            if not more:
                return
            *lines, told = told.split(b"\n")
            for rank in (rank for line in lines for rank in json.loads(line)):
                pid = os.fork()
                if not pid:
                    run_rank(rank)
                pidfd = os.pidfd_open(pid)
                ranks[pidfd] = rank, pid
                poll.register(pidfd, select.POLLIN)


main()
