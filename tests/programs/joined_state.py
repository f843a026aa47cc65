"""A loop of one's own with every kind of state that a joining replica must be given.

Argument: the number of steps; 0: until two replicas have joined, then rank 0 dies, and the others take some steps
more. The first living replica writes a digest of each kind of state, and the number of steps, to `digests.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import recover

torch.set_num_threads(1)
STEPS, RUN = int(sys.argv[1]), Path(os.environ["RECOVER_RUN_DIR"])
REPLICAS, DIES, ENDS = 3, 3, 8  # replicas at the start; steps after the joins


class Tempered(torch.nn.Linear):
    temperature = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(inputs) / self.temperature)

    def get_extra_state(self) -> dict[str, Any]:
        return {"temperature": self.temperature}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.temperature = state["temperature"]


class Nested(torch.optim.SGD):
    """SGD with lists of tensors in its state, under keys of two types."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault(0, [torch.zeros_like(parameter), {"calls": 0}])
                state.setdefault("last", torch.zeros_like(parameter))
                state[0][0].mul_(0.9).add_(parameter.grad)
                state[0][1]["calls"] += 1
                parameter.grad.add_(state[0][0], alpha=0.1).add_(state["last"], alpha=0.01)
                state["last"].copy_(parameter.grad)
        return super().step()


class Stream:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(index))


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return [str(value.dtype), np.asarray(value).tobytes().hex()]
    if isinstance(value, dict):
        return [[repr(key), flat(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    return repr(value)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(flat(value)).encode()).hexdigest()[:16]


world = recover.init()
torch.manual_seed(world.rank)  # what a replica makes itself is replaced
model = torch.nn.Sequential(Tempered(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
matrices = [p for p in model.parameters() if p.ndim == 2]
nested = Nested(matrices, lr=0.05)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(nested, factor=0.9, patience=3)
decay = torch.optim.lr_scheduler.ExponentialLR(nested, 0.999)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 500)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
notes: dict[str, Any] = {"drawn": [], "best": 1e9, "rows": np.zeros(2)}
extra = {"plateau": plateau, "decay": decay, "notes": notes}
step = recover.Step(
    world,
    model,
    [nested, adamw],
    6,
    clip=[0.5, None],
    scheduler=[cosine],
    reduction="reproducible",
    extra=extra,
)
recover.resume(step, RUN / "saved", extra={"average": average})
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(1234)


def tell(steps: int, digests: dict[str, str]) -> None:
    (RUN / "digests.json").write_text(json.dumps({"steps": steps, **digests}))


joined_at = 0
while step.index < (STEPS or 10**9) and not (joined_at and step.index >= joined_at + ENDS):
    scale = 0.5 + torch.rand(()).item() * random.random() * np.random.rand()  # drawn alike, used in the loop
    if step.index == 5:
        model[1].eval()
    for inputs in step.microbatches(Stream()):
        time.sleep(0 if STEPS else 0.01)
        loss = ((model(inputs * scale) - inputs.sum(1, keepdim=True)) ** 2).mean()
        step.backward(loss, weight=0 if step.index == 6 else 1)
    plateau.step(step.loss)
    decay.step()
    average.update_parameters(model)
    model[0].temperature *= 0.999
    notes["best"] = min(notes["best"], step.loss)
    notes["drawn"] = [*notes["drawn"][-3:], torch.rand(()).item()]
    notes["rows"] += np.random.rand(2)
    if not STEPS and not joined_at and sum(replica >= REPLICAS for replica in world.replicas) == 2:
        joined_at = step.index
    if joined_at and world.rank == 0 and step.index == joined_at + DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if step.index % 50 == 0:
        recover.save(step, RUN / "saved", extra={"average": average})
recover.save(step, RUN / "saved")
state = {
    "parameters": dict(model.named_parameters()),
    "buffers": dict(model.named_buffers()),
    "flags": [module.training for module in model.modules()],
    "extra state": model[0].temperature,
    "optimizers": [nested.state_dict(), adamw.state_dict()],
    "plateau": plateau.state_dict(),
    "decay": decay.state_dict(),
    "cosine": cosine.state_dict(),
    "average": dict(average.state_dict()),
    "notes": notes,
    "draws": [random.random(), np.random.rand(), torch.rand(()).item()],
    "skipped": step.skipped,
}
with torch.no_grad():
    step.on_first(tell, step.index, {name: digest(value) for name, value in state.items()})
