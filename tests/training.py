"""Runs `recover train` on a very small model, and reads what the run left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from patience import PATIENCE

from recover.runs.records.json_lines import read

SHAPE = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CAN_BE_CUT = {"num_hidden_layers": 2, "num_key_value_heads": 2}  # into stages, and into slices
ON_GPU = " gpu_peak_mib mfu" if os.environ.get("TEST_DEVICE") == "cuda" else ""
STEP_FIELDS = (
    "step loss grad_norm lr microbatches tokens replicas epoch accum roles seconds data_digest at "
    f"compute_ms wait_ms parameters_before contents{ON_GPU}"
)
INCIDENT_FIELDS = (
    "step location dead_ranks dead_replicas boundary restore extra_microbatches redone_microbatches epoch "
    "detect_ms repair_ms restore_ms redo_ms at"
)
SUMMARY_FIELDS = (
    "steps microbatches_min microbatches_max replicas_start replicas_end failures tokens seconds tokens_per_second "
    f"effective_throughput final_loss parameters_digest goodput{ON_GPU and f'{ON_GPU} gpu'}"
)


def small_world(place: Path, **shape: int) -> list[str]:
    """The keys for a very small model and corpus, made in `place`; `shape`: keys of the model that replace SHAPE's."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.json").write_text(json.dumps({**SHAPE, **shape}))
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    (place / "corpus.txt").write_bytes(text[:120_000])
    return [
        f"model={place / 'model.json'}",
        f"data.path={place / 'corpus.txt'}",
        "seq_len=32",
        f"device={os.environ.get('TEST_DEVICE', 'cpu')}",
        "lr=2e-3",  # at 1e-2 this model is chaotic: the order of summation alone parts two curves
        "warmup_steps=3",
        "log.tensorboard=false",
        "checkpoint.every=0",
    ]


@dataclass
class Trained:
    """A run that has ended."""

    code: int
    output: str
    run_dir: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self._lines("steps.jsonl")

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return self._lines("incidents.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    @property
    def has_summary(self) -> bool:
        return (self.run_dir / "summary.json").exists()

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("*"))

    def facts(self, checkpoint: str) -> dict[str, Any]:
        """The description in a checkpoint."""
        text = (self.run_dir / "checkpoints" / checkpoint / "trainer.json").read_text()
        facts: dict[str, Any] = json.loads(text)
        return facts

    def samples(self, rank: int) -> dict[int, list[int]]:
        """Contributions of a rank, by step, from its log."""
        log = self.run_dir / "ranks" / f"{rank}.log"
        found: dict[int, list[int]] = {}
        for line in log.read_text().splitlines() if log.exists() else ():
            _, marked, rest = line.partition(" step ")
            if marked and ": loss " in rest:
                spans = rest.rpartition("samples ")[2]
                found[int(rest.partition(":")[0])] = [
                    number
                    for span in spans.split(", ")
                    if span != "none"
                    for number in range(int(span.split("-")[0]), int(span.split("-")[-1]) + 1)
                ]
        return found

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(
    run_dir: Path,
    *words: str,
    kills: Sequence[str] = (),
    resume: Path | str | None = None,
    quiet: bool = False,
    output: IO[str] | None = None,
) -> subprocess.Popen[str]:
    """Start a run. `quiet`: its output is discarded. Otherwise it is read only after the end, and a pipe that is full
    stops a launcher. `output`: a file for the output, which a test can read meanwhile."""
    command = [sys.executable, "-m", "recover.cli", "train", *words, "--run-dir", str(run_dir)]
    if resume is not None:
        command += ["--resume", str(resume)]
    for kill in kills:
        command += ["--kill", kill]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
    where = output or (subprocess.DEVNULL if quiet else subprocess.PIPE)
    return subprocess.Popen(
        command,
        env=environment,
        stdout=where,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group such as a terminal makes: Ctrl-C can be sent to all of it
    )


def finish(process: subprocess.Popen[str], run_dir: Path, limit: float = PATIENCE) -> Trained:
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Trained(process.returncode, output or "", run_dir)


def train(
    run_dir: Path,
    *words: str,
    kills: Sequence[str] = (),
    resume: Path | None = None,
    limit: float = PATIENCE,
) -> Trained:
    return finish(start(run_dir, *words, kills=kills, resume=resume), run_dir, limit)


def losses(run_dir: Path) -> int:
    """How many incidents of a run at work have lost replicas; `joins`: how many have admitted replicas."""
    return _incidents(run_dir).count("lost")


def joins(run_dir: Path) -> int:
    return _incidents(run_dir).count("joined")


def _incidents(run_dir: Path) -> list[str]:
    """The kinds of all incidents. None is ever removed, so a test cannot miss one."""
    return [line.get("kind", "lost") for line in read(run_dir / "incidents.jsonl").whole]


def check_lines(run: Trained, steps: int, batch: int | None) -> None:
    """No line of `steps.jsonl` is lost, doubled or torn, and each says that the step had exactly B microbatches."""
    text = (run.run_dir / "steps.jsonl").read_text()
    assert text.endswith("\n"), run.output
    assert [line["step"] for line in run.steps] == list(range(1, steps + 1)), run.output
    if batch is not None:
        assert {line["microbatches"] for line in run.steps} == {batch}, run.output
    keys = [(line["step"], line["epoch"]) for line in run.incidents]
    assert keys == sorted(set(keys)), run.output
