"""`nanogpt_before.py` made fault tolerant: the same GPT, the same losses, whichever replicas die.

    RECOVER_KILL="3:0:backward 9:2:in-reduce" recover run -n 3 examples/nanogpt.py

Two of three replicas are killed, the one that writes first; the last one goes on with all microbatches of every step.
Started once more, it goes on from its last checkpoint.
"""

import math
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import recover

STEPS, ACCUM, EVAL_EVERY, SAVE_EVERY = 16, 6, 8, 8
BATCH, BLOCK, WIDTH, LAYERS, HEADS = 4, 64, 64, 2, 4
LR, WARM_UP, CLIP = 3e-3, 4, 1.0
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "out-nanogpt")

files = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
data = {"train": text[: int(0.9 * len(text))], "val": text[int(0.9 * len(text)) :]}


class Stream:
    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return get_batch("train", number)


def get_batch(split: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(data[split]) - BLOCK, (BATCH,), generator=generator)
    rows = torch.stack([data[split][start : start + BLOCK + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._begin)

    def _begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def factor(done: int) -> float:
    if done < WARM_UP:
        return (done + 1) / (WARM_UP + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (done - WARM_UP) / (STEPS - WARM_UP)))


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    model.eval()
    loss = sum(model(*get_batch("val", number)).item() for number in range(4)) / 4
    model.train()
    return loss


world = recover.init()
torch.manual_seed(1337)
model = GPT()
optimizer = make_optimizer(model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
step = recover.Step(world, model, optimizer, ACCUM, clip=CLIP, scheduler=scheduler)
recover.resume(step, OUT)

while step.index < STEPS:
    for tokens, targets in step.microbatches(Stream()):
        step.backward(model(tokens, targets))
    step.on_first(print, f"step {step.index} loss {step.loss:.4f}")
    if step.index % EVAL_EVERY == 0:
        step.on_first(print, f"step {step.index} val {evaluate(model):.4f}")
    if step.index % SAVE_EVERY == 0:
        recover.save(step, OUT)
