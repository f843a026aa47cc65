"""The GPUs of this host, counted without torch, and their peak performance by data sheet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # from NCCL 2.30.3 on: several ranks on one GPU

# Dense bfloat16 FLOP/s, from the vendor's data sheets; those print twice as much where sparsity is
# counted. The first name that fits counts.
PEAKS = {
    r"\bGB200\b": 2500e12,
    r"\bB200\b": 2250e12,
    r"\bGH200\b": 989e12,
    r"\bH200 NVL\b": 835e12,
    r"\bH200\b": 989e12,
    r"\bH100 NVL\b": 835e12,
    r"\bH100\b.*\bPCIe\b": 756e12,
    r"\bH100\b": 989e12,
    r"\bH20\b": 148e12,
    r"\bA100\b": 312e12,
    r"\bL40S\b": 362e12,
    r"\bL40\b": 181e12,
    r"\bL4\b": 121e12,
}


def peak_of(card: str) -> float | None:
    """FLOP/s of a card, by the name that its driver gives it; None for an unknown card, or a MIG
    slice."""
    if re.search(r"\bMIG\b", card):
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(name, card)), None)


def gpus_on_host(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """How many GPUs a process that is started from here sees."""
    return visible(environment.get(VISIBLE), _present(root))


def has_gpu_per_rank(ranks_on_host: int) -> bool:
    """Whether each of this number of ranks on this host has a GPU of its own."""
    return 0 < ranks_on_host <= gpus_on_host()


def visible(asked: str | None, present: int) -> int:
    """The number of GPUs that CUDA_VISIBLE_DEVICES leaves. As in CUDA, the list ends at the first
    unknown one."""
    if asked is None:
        return present
    found: list[str] = []
    for word in (word.strip() for word in asked.split(",")):
        known = int(word) < present if word.isdigit() else word.startswith(("GPU-", "MIG-")) and present > 0
        if not known or word in found:
            break
        found.append(word)
    return len(found)


def sharing_refused(ranks_on_host: int, environment: Mapping[str, str] = os.environ) -> str:
    """Why NCCL cannot connect these ranks, with the remedy; "" if it can."""
    if environment.get(SHARING, "0") not in ("", "0"):
        return ""
    gpus = gpus_on_host(environment)
    if gpus == 0:
        asked = environment.get(VISIBLE)
        hidden = f" ({VISIBLE}={asked})" if asked is not None else ""
        return f"NCCL needs GPUs, and no GPU is visible here{hidden}; use a machine with some"
    if ranks_on_host <= gpus:
        return ""
    return (
        f"there are {ranks_on_host} ranks on {gpus} GPU{'s' * (gpus > 1)}, and NCCL refuses ranks that share one; use "
        f"fewer ranks, or, with NCCL 2.30.3 or later, set {SHARING}=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4"
    )


def _present(root: Path) -> int:
    """The number of GPUs here, by the list of the driver and by device files: a container may see
    all cards of the host, and have some."""
    listed = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    devices = len([path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if listed or devices:
        return min(n for n in (listed, devices) if n)
    return _told_by_the_driver()


def _told_by_the_driver() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
