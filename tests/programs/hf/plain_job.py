"""A script with transformers.Trainer that does not use the adapter."""

from pathlib import Path

from hf_parts import Rows, arguments, model, padded
from transformers import Trainer

settings = arguments(Path("unused"), max_steps=1)
Trainer(model=model(), args=settings, train_dataset=Rows(), data_collator=padded).train()
