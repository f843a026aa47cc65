"""Muon for the matrices of the hidden layers, AdamW for the rest (docs/guides/recipes/muon-adamw.md).

RECOVER_KILL="4:1:in-reduce" recover run -n 3 examples/muon_adamw.py
"""

import torch

import recover

STEPS, BATCH = 20, 6


def rows(index: int) -> torch.Tensor:
    """Microbatch `index`: sequences that count up by 1, 2 or 3."""
    draw = torch.Generator().manual_seed(index)
    first, by = (torch.randint(low, 32, (8, 1), generator=draw) for low in (0, 1))
    return (first + (1 + by % 3) * torch.arange(16)) % 32


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


world = recover.init()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(32, 48), torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)
)
hidden = [model[1].weight]
rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
muon, adamw = torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.01)
schedulers = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.1, STEPS) for each in (muon, adamw)]
step = recover.Step(
    world, model, optimizer=[muon, adamw], global_batch=BATCH, clip=[None, 0.5], scheduler=schedulers
)
recover.resume(step, "runs/muon")

while step.index < STEPS:
    for tokens in step.microbatches([rows(index) for index in range(STEPS * BATCH)]):
        step.backward(loss_of(model, tokens))
    step.on_first(print, f"step {step.index} loss {step.loss:.6f}")
    if step.index % 5 == 0:
        recover.save(step, "runs/muon")
