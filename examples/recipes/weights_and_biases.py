"""Weights & Biases (docs/guides/recipes/weights-and-biases.md).

    WANDB_MODE=offline RECOVER_KILL="4:1:in-reduce 25:0:vote" recover run -n 3 examples/recipes/weights_and_biases.py

The script of docs/guides/recipes/index.md with the blocks of that page; `python tests/recipes.py` writes this file.
"""

import time

import torch

import recover

STEPS, EVERY, PAD = 40, 5, 0
PACE = 0.2  # seconds a step: without it, 40 steps end before a lost replica has rejoined


def make_rows(count: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    first, by, length = (
        torch.randint(low, high, (count, 1), generator=draw) for low, high in ((0, 31), (1, 4), (6, 17))
    )
    place = torch.arange(16)
    return torch.where(place < length, 1 + (first + by * place) % 31, PAD)


def loss_of(net: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits, targets = net(rows[:, :-1]), rows[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)


def tokens_in(rows: torch.Tensor) -> int:
    return int((rows[:, 1:] != PAD).sum())


@torch.no_grad()
def held_out_loss(net: torch.nn.Module) -> float:
    net.eval()
    loss = loss_of(net, held_out).item()
    net.train()
    return loss


world = recover.init()
torch.manual_seed(0)
stream = recover.stream(make_rows(512, seed=1), batch_size=8, shuffle=True)
held_out = make_rows(64, seed=2)
model = torch.nn.Sequential(torch.nn.Embedding(32, 48), torch.nn.Linear(48, 32))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.03)
step = recover.Step(world, model, optimizer, global_batch=6)
run, curves = None, {"rows": []}
step.extra["curves"] = curves


def log(rows: list[tuple[int, dict[str, float]]]) -> None:
    global run
    if run is None:
        import os

        import wandb

        os.makedirs("runs", exist_ok=True)
        run = wandb.init(project="mine", id="mine-1", resume="allow", dir="runs")
    else:
        rows = rows[-1:]
    for number, values in rows:
        run.log(values, step=number)


recover.resume(step, "runs/mine")

while step.index < STEPS:
    for rows in step.microbatches(stream):
        step.backward(loss_of(model, rows), weight=tokens_in(rows))
    step.on_first(print, f"step {step.index} loss {step.loss:.6f}")
    row = (step.index, {"loss": step.loss, "replicas": len(world.replicas)})
    curves["rows"] = [*curves["rows"][-999:], row]
    step.on_first(log, curves["rows"])
    if step.index % EVERY == 0:
        recover.save(step, "runs/mine")
    time.sleep(PACE)
if run is not None:
    run.finish()
