"""Use of the GPUs: how many ranks share one, memory, and model FLOPs utilisation."""

from __future__ import annotations

import os

import torch

from recover.job.gpus import VISIBLE, peak_of
from recover.job.process import ranks_on_host
from recover.runs.records.kinds import StepRecord
from recover.runs.writing.run_records import note_gpu_memory
from recover.train.models.flops import flops_per_token
from recover.train.models.llama_config import LlamaConfig


class GpuUse:
    """Adds the use of the GPU to the line of every step; on a CPU it adds nothing."""

    def __init__(self, device: torch.device, shape: LlamaConfig, seq_len: int) -> None:
        self._flops, self._device = flops_per_token(shape, seq_len), device
        self.card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._cards = torch.cuda.device_count() if self.card else 0
        self._peak = peak_of(self.card)

    def note(self, line: StepRecord, members: tuple[int, ...]) -> None:
        if not self.card:
            return
        note_gpu_memory(line, self._device)
        if self._peak and line["seconds"]:
            used = cards_in_use(members, self._cards, ranks_on_host())
            line["mfu"] = round(mfu(line["tokens"], line["seconds"], self._flops, used * self._peak), 4)

    def describe(self, members: tuple[int, ...]) -> str:
        """One line for the start of a run."""
        ranks = ranks_on_host() or len(members)
        share = -(-ranks // self._cards)
        where = "on a host" if len(members) > ranks else "here"
        shown = f"{VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else f"{VISIBLE} is not set"
        sharing = f"{share} ranks share a GPU" if share > 1 else "each has a GPU of its own"
        speed = (
            f"MFU is of {self._peak / 1e12:.0f} TFLOP/s, {self.card} (dense bfloat16, the vendor's data sheet)"
            if self._peak
            else f"no MFU: the peak of {self.card} is not known here"
        )
        return f"{ranks} ranks on {self._cards} x {self.card} {where} ({shown}), {sharing}; {speed}"


def mfu(tokens: float, seconds: float, flops: float, peak: float) -> float:
    """Model FLOPs utilisation: operations that the tokens needed, as a fraction of what the GPUs could have done."""
    return tokens * flops / (seconds * peak)


def cards_in_use(members: tuple[int, ...], cards: int, on_host: int) -> int:
    """Number of GPUs that living ranks use. The ranks of a host are distributed round-robin over its GPUs, and hosts
    are filled in order."""
    size = on_host or len(members)
    return len({(rank // size, rank % size % cards) for rank in members})
