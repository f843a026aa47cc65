"""Shared by programs of benchmarks: a rank with its device, torch's own process groups, random tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import recover
from recover.parallel.gathering import gather_json
from recover.train.device import pick_device
from recover.train.models import SIZES, Llama
from recover.world.carriers.nccl_library import Nccl

Tokens = tuple[torch.Tensor, torch.Tensor]


class GpuRank:
    """`kind` is cuda or cpu."""

    def __init__(self, kind: str) -> None:
        torch.set_num_threads(1)
        self.device = pick_device(kind)
        self.on_gpu = self.device.type == "cuda"
        self.world = recover.init()
        self.run_dir = Path(self.world.job.run_dir or ".")
        self.ranks = self.world.grid.ranks
        self.refused: dict[str, str] = {}  # by torch's own groups, with the reason
        self.card = torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"
        cards = torch.cuda.device_count() if self.on_gpu else 0
        # Version of the loaded library: torch reports the one that it was built with.
        self.place = {"card": self.card, "cards": cards, "nccl": Nccl().version if self.on_gpu else ""}

    def stock_groups(self, backends: str) -> dict[str, dist.ProcessGroup]:
        """Torch's own groups over all ranks. The default group is gloo, and a barrier outside our carriers."""
        store = dist.FileStore(str(self.run_dir / "store"), self.ranks)
        dist.init_process_group("gloo", store=store, rank=self.world.rank, world_size=self.ranks)
        return {name: group for name in backends.split(",") if (group := self._group(name))}

    def _group(self, backend: str) -> dist.ProcessGroup | None:
        """A group that has reduced once; None, on all ranks, if that failed: NCCL may refuse a shared GPU."""
        group, said = None, ""
        try:
            group = dist.new_group(backend=backend)
            dist.all_reduce(torch.ones(1, device=self.device), group=group)
            self.synchronize()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if refusals := [text for text in gather_json(said) if text]:
            self.refused[f"stock {backend}"] = refusals[0]
            return None
        return group

    def say(self, text: str) -> None:
        """Print progress, which is also a sign of life for the launcher."""
        if self.world.rank == 0:
            print(f"  {text}", flush=True)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def make(self, size: str, seq_len: int) -> tuple[Any, torch.optim.Optimizer]:
        """The model, created on its device, and its optimizer."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Llama(replace(SIZES[size], seq_len=seq_len))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=self.on_gpu or None)

    def forward(self, model: Any, batch: Tokens) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            loss: torch.Tensor = model(*batch)
        return loss


class RandomTokens:
    """A stream of random tokens, created on the device: their values do not change the time of a step."""

    def __init__(self, vocab: int, seq_len: int, device: torch.device) -> None:
        self._vocab, self._shape, self._device = vocab, (1, seq_len + 1), device

    def __getitem__(self, index: int) -> Tokens:
        generator = torch.Generator(device=self._device).manual_seed(index)
        tokens = torch.randint(0, self._vocab, self._shape, generator=generator, device=self._device)
        return tokens[:, :-1], tokens[:, 1:]
