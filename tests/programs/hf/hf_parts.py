"""A small model, data and arguments for tests of Hugging Face's Trainer. Rows have different lengths, so a loss over
tokens is not the mean of the losses of microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainingArguments

torch.set_num_threads(1)
ROWS, BATCH, STEPS = 50, 6, 30  # 25 microbatches: the last step of an epoch has 1 instead of 6


def row(number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    length = int(torch.randint(4, 20, (1,), generator=draw))
    first, by = torch.randint(0, 60, (1,), generator=draw), torch.randint(1, 4, (1,), generator=draw)
    return {"input_ids": (first + by * torch.arange(length)) % 64}


class Rows(Dataset[Any]):
    def __init__(self, first: int = 0, count: int = ROWS) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return row(self.first + index)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (row(number) for number in range(10_000))


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    every = [each["input_ids"] for each in rows]
    labels = torch.nn.utils.rnn.pad_sequence(every, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels >= 0).long()}


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, max_position_embeddings=32, **sizes, **heads))


class PlainLoss(torch.nn.Module):
    """A model that takes no arguments of a loss: a mean over each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, Any]:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        return {"loss": mean_loss(logits, labels[:, 1:]), "logits": logits}


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def arguments(output: Path, **settings: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": BATCH,
        "max_steps": STEPS,
        "learning_rate": 5e-3,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    return TrainingArguments(**usual | settings)
