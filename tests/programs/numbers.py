"""Runs of a model with a memory and with draws: its parameters and buffers, and draws of the user's own generators.

Argument: `plain` or `sharded`. Every rank writes down parameters, buffers and the draws of its user.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import recover
import recover.dropin
from recover.parallel import rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_numbers import BATCH, STEPS, Stream, draws, loss_of, make_net, make_optimizer, seed_user

torch.set_num_threads(1)
world = recover.init()
diary = os.open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, **facts}) + "\n").encode())


def values(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, object]:
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)().detach() for name, t in named}
    return {name.removeprefix("module."): tensor.tolist() for name, tensor in whole.items()}


def begin(
    model: torch.nn.Module, buffers: Iterable[str] = ("seen",), **options: object
) -> tuple[torch.nn.Module, recover.Step]:
    options = {"reduction": "reproducible", **options}
    return model, recover.Step(world, model, make_optimizer(model), BATCH, buffers=buffers, **options)


def run_step(
    model: torch.nn.Module, step: recover.Step, dies: list[int] | None = None, leave: bool = False
) -> None:
    for number, batch in enumerate(step.microbatches(Stream())):
        if dies == [step.index + 1, world.replica] and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step.backward(loss_of(model, rows(world, batch)))
        if leave:
            return


def train(name: str, model: torch.nn.Module, step: recover.Step, dies: list[int] | None = None) -> None:
    seed_user()
    own, losses = [draws()], []
    while step.index < STEPS:
        run_step(model, step, dies)
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 8))  # an evaluation, which does not move anything
        model.train()
        own.append(draws())
        losses.append((step.loss, step.grad_norm))
    facts = {"own": own, "losses": losses, "state": step.state_dict()}
    note(name, parameters=values(model.named_parameters()), buffers=values(model.named_buffers()), **facts)


def leave_early() -> None:
    model, step = begin(make_net())
    before = values(model.named_buffers())
    seed_user()
    own = [draws()]
    run_step(model, step, leave=True)
    own.append(draws())
    same = values(model.named_buffers()) == before
    train("after-leaving", model, step)
    note("left", own=own, same=same)


def rebatch(state: dict) -> None:
    model = make_net()
    step = recover.Step(world, model, make_optimizer(model), 4, buffers=["seen"])
    try:
        step.load_state_dict(state)
    except ValueError as error:
        note("refused", what="batch", text=str(error))
    step.load_state_dict(state, rebatch=True)
    run_step(model, step)
    note("rebatched", index=step.index, samples=step.all_samples, state=step.state_dict())


def refuse_an_unnamed_buffer() -> None:
    model, step = begin(make_net(), buffers=[])
    try:
        run_step(model, step)
    except RuntimeError as error:
        note("refused", what="buffer", text=str(error))


if sys.argv[1] == "sharded":
    train("calm", *begin(recover.hsdp(make_net(), world)))
else:
    train("calm", *begin(make_net()))
    train("torn", *begin(make_net()), dies=[2, 1])
    warnings.simplefilter("ignore")  # steps that are left early
    leave_early()
    model, step = begin(make_net())
    train("again", model, step)
    rebatch(step.state_dict())
    recover.dropin.init_replica_world(world)
    wrapped = DistributedDataParallel(make_net())
    gradients = recover.dropin.DDPGradients(wrapped)
    train("ddp", *begin(wrapped, ["module.seen"], reduction="fast", gradients=gradients))
    refuse_an_unnamed_buffer()
