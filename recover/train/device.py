"""The device that a rank computes on."""

from __future__ import annotations

import torch

from recover.job.process import rank_on_host


def pick_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = rank_on_host() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
