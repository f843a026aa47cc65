"""One page of all that was measured: our figures, and the paper's beside them as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recover.runs.report.html import render
from recover_lab.publish.headlines import headlines, to_markdown
from recover_lab.publish.measured_sources import measured
from recover_lab.publish.pictures import draw
from recover_lab.publish.tables import rows_of

PACED = (
    "The comparisons are paced: every microbatch takes at least a set time, most of it waiting, as if each rank had "
    "an accelerator of its own. Ranks that share a few cores would get faster when one dies, and that would flatter "
    "whoever goes on without it. Processes, SIGKILLs, communication, failure handling, restarts and checkpoints are "
    "real."
)
BASELINE = (
    "The baseline is stock torch on gloo: DistributedDataParallel, fully_shard on a 2-D mesh, or its tensor and "
    "pipeline parallelism, with asynchronous torch.distributed.checkpoint to memory (/dev/shm) and torchrun's own "
    "restart, at full size again each time."
)
# What stands in front of a part's figures, and what the paper says about it.
TEXTS = {
    "trajectory": (
        "The same training: on stock torch and on ours, where nobody dies; half of the replicas killed one by one "
        "inside gradient reductions; the same deaths with a batch that shrinks (the paper's strawman).",
        "512 A100s, 256 of them lost over 260 steps: loss curves visually indistinguishable; throughput per living GPU "
        "drops at the first failure, climbs and exceeds the failure-free run's.",
    ),
    "breakdown": (
        "One failure in step 1.5N, N steps between the baseline's checkpoints. Failure handling ends when the first "
        "new process starts; restart is all until training goes on, but for loading.",
        "The baseline's cost grows with N, ours is flat and lower even at N = 2.",
    ),
    "multi": (
        "Failures in steps 1.5F, 2.5F, ..., until half of the replicas are gone. F is chosen so that the baseline "
        "makes progress in 8 of 18 parts of its time, as the production system that the paper cites.",
        "2.23 times the throughput per living GPU after successive failures, 74.9% more tokens at 234 GPU-hours (3D, "
        "128 A100s, 16 replicas); 47.4% more at 1338 GPU-hours (HSDP).",
    ),
    "sweep": (
        "Failures ever rarer. Curves are arithmetic on measured pieces: between two failures the baseline takes F "
        "steps, F/N saves, one stall and N/2 steps again, at the N that is best for it; ours F steps of the survivors "
        "and one recovery. Dots are measured end to end.",
        "Restarts take about 10 minutes on 100,000 GPUs, where failures come every 18 minutes.",
    ),
    "peers": ("The same kill, other systems that go on.", ""),
    "overhead": ("Without failures, against stock torch, turn by turn.", "Close to the NCCL reference."),
    "recovery": ("From SIGKILL inside a reduction to the commit of that step.", ""),
    "repair": ("From SIGKILL to a repaired world with a working carrier.", ""),
    "collectives": ("All-reduce, median milliseconds.", ""),
    "simulate": (
        "Failures simulated per second of one core, as the cluster grows, and a whole study of the largest one.",
        "",
    ),
    "hosts": (
        "Several hosts, emulated by namespaces of one machine where that can be done. An agreement: from the last vote "
        "to the last replica that holds the result, one etcd in memory; replicas come at uneven times. A step against "
        "stock DDP on gloo, turn by turn over the same links. A rank, a host and a cable are lost inside a reduction. "
        "The same power cut on torchrun and torchft.",
        "",
    ),
    "return": (
        "A replica dies inside a reduction and its process is started again at once: until the next step, until all "
        "are at work again, and what the others wait for meanwhile, by the size of the state.",
        "",
    ),
    "returning": (
        "Failure after failure, and every lost replica comes back: tokens an hour against checkpoint-restart.",
        "",
    ),
    "gpu": (
        "On GPUs: a step without failures, with the times of others and ours as a ratio to their tokens/s; a SIGKILL "
        "inside a reduction; sums of large tensors.",
        "Close to the NCCL reference.",
    ),
}


def build(output: Path) -> Path:
    """Of all that was measured with the sources as they are; its headlines also as `figures.md`."""
    found = sorted(output.glob("*.json"), key=lambda path: (_rank(path), path.stem))
    contents = {path.stem: json.loads(path.read_text()) for path in found if measured(path)}
    lines = headlines(contents)
    (output / "figures.md").write_text(to_markdown(lines), encoding="utf-8")
    page = output / "index.html"
    text = render(
        Path(__file__).with_name("page.html"),
        title="What failures cost",
        leads=(PACED, BASELINE),
        headlines=[["what", "measured", "in the paper"], *map(list, lines)],
        parts=[part for name, content in contents.items() if (part := _part(name, content, output))],
    )
    page.write_text(text, encoding="utf-8")
    return page


def _part(name: str, content: dict[str, Any], output: Path) -> dict[str, Any] | None:
    """The section about one file of figures; None if it holds no part that the page knows."""
    part = next((part for part in TEXTS if part in content or f"{part}_ms" in content), None)
    if part is None:
        return None
    results = content.get(part, content)
    before, paper = TEXTS[part]
    return {
        "name": name,
        "heading": _heading(name),
        "before": before,
        "paper": paper,
        "picture": draw(part, results, output / f"{name}.png"),
        "rows": rows_of(part, results),
        "machine": content["machine"],
        "commit": content.get("commit", "not known"),
        "measured_at": content.get("measured_at", ""),
    }


def _rank(path: Path) -> int:
    return next((n for n, part in enumerate(TEXTS) if path.stem.startswith(part)), len(TEXTS))


def _heading(stem: str) -> str:
    part, _, kind = stem.partition("-")
    return part.capitalize() + (f", {kind.upper()}" if kind else "")
