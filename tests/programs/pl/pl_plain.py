"""A script with Lightning that does not use the adapter."""

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

torch.set_num_threads(1)
L.Trainer(max_steps=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).fit(
    BoringModel()
)
