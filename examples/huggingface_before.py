"""A Hugging Face model in a plain loop, with a DataLoader: padded sequences, and the mean over all of their tokens.

    python examples/huggingface_before.py

One process. `huggingface.py` is the same script after porting it. Needs the extra: pip install 'recover-train[hf]'.
"""

import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

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
loader = DataLoader(Lines(), batch_size=SEQUENCES, collate_fn=padded, num_workers=2)
batches = iter(loader)

for index in range(STEPS):
    batch = [next(batches) for _ in range(GLOBAL_BATCH)]
    targets = [int((each["labels"][:, 1:] >= 0).sum()) for each in batch]
    total = 0.0
    for each, number in zip(batch, targets, strict=True):
        loss = model(**each).loss * number / sum(targets)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"step {index + 1} loss {total:.4f}")
