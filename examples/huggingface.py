"""A Hugging Face model, random at the start, trained through deaths. Needs the extra: pip install 'recover[hf]'.

    RECOVER_KILL="3:0:backward 6:2:vote" recover run -n 3 examples/huggingface.py

Two of three replicas are killed, the first one among them; the last one runs all 12 microbatches of every step.
"""

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import recover

STEPS, GLOBAL_BATCH = 12, 12
SEQUENCES, LENGTH = 8, 64


class Stream:
    """Sample i: the arguments of the model's forward, picked by i alone. Tokens are the bytes of Python's sources."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        starts = torch.randint(len(self.text) - LENGTH, (SEQUENCES,), generator=generator)
        tokens = torch.stack([self.text[start : start + LENGTH] for start in starts]).long()
        return {"input_ids": tokens, "labels": tokens}


world = recover.init()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    attention_dropout=0.1,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
step = recover.Step(world, model, optimizer, GLOBAL_BATCH, clip=1.0, scheduler=scheduler)
stream = Stream()

while step.index < STEPS:
    for batch in step.microbatches(stream):
        step.backward(model(**batch).loss)
    if world.replica == world.replicas[0]:
        print(f"step {step.index} loss {step.loss:.4f} on {step.weight:g}, replicas {world.replicas}")
