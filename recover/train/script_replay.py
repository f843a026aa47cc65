"""Replay of a user's script: it runs again on one replica, from a checkpoint of `recover.save` or from its beginning,
and ends after the steps that were asked for.

Nothing that the script asks ReCoVer to write is written: functions for `step.on_first` are not called, and
`recover.save` does nothing. Effects of the script itself happen again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recover.checkpoint.directory import Found, all_good
from recover.checkpoint.way_on import NOTE
from recover.job.code import file_digest
from recover.job.config_keys import ConfigError
from recover.job.machine import processor
from recover.job.record_files import FILES
from recover.job.script_replay import ScriptReplay
from recover.launch.launcher import launch
from recover.launch.request import LaunchRequest
from recover.runs.records.environments import NAME as ENVIRONMENT
from recover.runs.records.environments import environments_of
from recover.runs.report.recorded_runs import Run

THREADS = "OMP_NUM_THREADS"
# Facts of a launch that a replay needs, and their types.
_RECORDED: dict[str, type] = {
    **dict.fromkeys(("torch", "processor", "reduction", "samples", "policy"), str),
    **dict.fromkeys(("threads", "replica_size", "global_batch"), int),
    **dict.fromkeys(("script", "code"), dict),
    "deterministic": bool,
}


@dataclass(frozen=True)
class RecordedScript:
    """How the script of a run was started."""

    command: tuple[str, ...]  # its path, or -m and its module; and its arguments
    directory: str
    replica_size: int
    threads: int
    global_batch: int

    @property
    def is_module(self) -> bool:
        return self.command[0] == "-m"


def checkpoints_of(run: Run) -> list[Found]:
    """The checkpoints that the script has saved where it resumes from, oldest first."""
    try:
        note = json.loads(FILES.read(run.path / NOTE) or b"{}")
        return all_good(Path(note["path"])) if note["resumes"] else []
    except (ValueError, KeyError, TypeError):
        return []


def script_of(run: Run, first: int, until: int) -> RecordedScript:
    """The script that has taken these steps, if they can be computed again here. Raises ConfigError.

    The step after `until` begins, too: the same command must have taken it, but its code may have changed."""
    last = min(until + 1, run.steps[-1]["step"])
    if any("part" in line for line in run.steps):
        raise ConfigError(
            f"{run.path} has steps of several recover.Steps, of which no checkpoint holds all; only runs of scripts "
            "with one Step can be replayed"
        )
    found = environments_of(run.path, first, last)
    if not found or any("script" not in facts for facts in found):
        raise ConfigError(
            f"{run.path} has no {ENVIRONMENT} with the command of its script for steps {first} to {last}: it was "
            "written by an earlier version of recover, or the script was not started by `recover run`; compare it "
            "with another run by `recover bisect`, or run the script again"
        )
    for facts in found:
        _refuse_damaged(run.path / ENVIRONMENT, facts)
        _refuse_inexact(run, facts)
        _refuse_other_machine(facts)
    scripts = {
        RecordedScript(
            tuple(facts["script"]["command"]),
            facts["script"]["directory"],
            facts["replica_size"],
            facts["threads"],
            facts["global_batch"],
        )
        for facts in found
    }
    if len(scripts) > 1:
        raise ConfigError(
            f"steps {first} to {last} of {run.path} were taken by launches with different commands, shapes or "
            f"batches ({'; '.join(sorted(map(str, scripts)))}): name steps of one launch"
        )
    for facts in environments_of(run.path, first, until):
        _refuse_other_code(facts["code"])
    (script,) = scripts
    if not Path(script.directory).is_dir():
        raise ConfigError(
            f"the script of {run.path} was started in {script.directory}, which is not there; restore it"
        )
    return script


def _refuse_damaged(path: Path, facts: Mapping[str, Any]) -> None:
    for key, kind in _RECORDED.items():
        if not isinstance(facts.get(key), kind):
            raise ConfigError(
                f"{path} is damaged: {key!r} of a launch is {facts.get(key)!r}, not of type {kind.__name__}; restore "
                "it from a copy of the run"
            )
    if not facts["script"].get("command"):
        raise ConfigError(
            f"{path} has no command of the script: it was not started by `recover run`, which a replay uses; run it "
            "again so"
        )


def _refuse_inexact(run: Run, facts: Mapping[str, Any]) -> None:
    needed = {"reduction": "reproducible", "samples": "exact"}
    for key, value in needed.items():
        if facts[key] != value:
            raise ConfigError(
                f"{run.path} was run with {key}={facts[key]!r}, so its bits depend on who computed what, and no other "
                f"run has them; only runs with {' and '.join(f'{k}={v!r}' for k, v in needed.items())} of recover.Step "
                "can be replayed"
            )
    if facts["policy"] == "adaptive":
        raise ConfigError(
            f"{run.path} was run with policy='adaptive', whose batch depends on the replicas that lived; only runs "
            "with a constant batch can be replayed"
        )


def _refuse_other_machine(facts: Mapping[str, Any]) -> None:
    on_gpu = torch.cuda.is_available() and facts["processor"] == torch.cuda.get_device_name()
    here = {"torch": torch.__version__, "processor": facts["processor"] if on_gpu else processor()}
    for key, name in {"torch": "torch", "processor": "the processor"}.items():
        if facts[key] != here[key]:
            raise ConfigError(
                f"{name} of the run is {facts[key]}, and here it is {here[key]}: other kernels have other bits; "
                "replay it where it was run"
            )
    if on_gpu and not facts["deterministic"]:
        raise ConfigError(
            "the script did not ask for deterministic kernels, and on a GPU others give other bits in each run; call "
            "torch.use_deterministic_algorithms(True) in it, and replay later runs"
        )


def _refuse_other_code(loaded: Mapping[str, tuple[str, str]]) -> None:
    for name, (path, digest) in loaded.items():
        try:
            now = file_digest(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"the run has loaded {name} from {path}, which cannot be read ({error.strerror}); "
                              "restore it") from None  # fmt: skip
        if now != digest:
            raise ConfigError(
                f"{path} has changed since the run (SHA-256 {now[:12]}, of the run {digest[:12]}); restore it, for "
                "example by checking out the commit of the run"
            )


def launch_script(script: RecordedScript, until: int, checkpoint: Found | None, where: Path) -> int:
    """Run the script again on one replica until this step. Returns the exit code."""
    order = ScriptReplay(until, script.global_batch, str(checkpoint.path.absolute()) if checkpoint else "")
    named, arguments = script.command[0], script.command[1:]
    if script.is_module:
        named, arguments = arguments[0], arguments[1:]
    request = LaunchRequest(
        Path(named),
        arguments,
        script.replica_size,
        where.absolute(),
        faults=[],
        module=script.is_module,
        is_user_script=True,
        replay=order.to_json(),
    )
    with _as_started(script):
        return launch(script.replica_size, request)


@contextmanager
def _as_started(script: RecordedScript) -> Iterator[None]:
    """Enter the directory of the run, with its number of threads: one replica alone would get more of them."""
    before, threads = os.getcwd(), os.environ.get(THREADS)
    os.chdir(script.directory)
    os.environ[THREADS] = str(script.threads)
    try:
        yield
    finally:
        os.chdir(before)
        if threads is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = threads
