"""`huggingface_before.py` made fault tolerant. Needs the extra: pip install 'recover-train[hf]'.

    RECOVER_KILL="3:0:backward 6:2:vote" recover run -n 3 examples/huggingface.py

Two of three replicas are killed, the first one among them; the last one runs all 12 microbatches of every step, and the
losses stay those of the one process before.
"""

import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

import recover

STEPS, GLOBAL_BATCH, SEQUENCES, LENGTH = 12, 12, 8, 64


class Lines(Dataset):
    """Stretches of Python's own sources, as bytes, of different lengths."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        lengths = torch.randint(
            LENGTH // 4, LENGTH, (4000,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        self.pieces = [text[start * LENGTH :][:length] for start, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(self.pieces[index]))


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels >= 0).long()}


world = recover.init()
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)
model = Qwen2ForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
stream = recover.stream(Lines(), batch_size=SEQUENCES, collate_fn=padded, workers=2)
step = recover.Step(world, model, optimizer, GLOBAL_BATCH, clip=1.0, scheduler=scheduler)

while step.index < STEPS:
    for each in step.microbatches(stream):
        step.backward(model(**each).loss, weight=int((each["labels"][:, 1:] >= 0).sum()))
    step.on_first(
        print, f"step {step.index} loss {step.loss:.4f} on {len(step.all_samples)} by {world.replicas}"
    )
