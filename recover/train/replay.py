"""`recover replay` and `recover audit`: compute steps of a run again, and compare them bit by bit.

One replica of the run's shape starts from the nearest checkpoint. With exact samples and reproducible sums its bits do
not depend on the number of replicas, nor on deaths and joins of the run.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from recover.checkpoint import directory
from recover.job.code import recover_version
from recover.job.config_keys import ConfigError
from recover.launch.launcher import launch
from recover.launch.request import LaunchRequest
from recover.runs.records.environments import NAME as ENVIRONMENT
from recover.runs.records.environments import environments, environments_of
from recover.runs.records.json_lines import read_lines
from recover.runs.records.kinds import Line
from recover.runs.report.recorded_runs import Run, read_runs
from recover.train.config import Config
from recover.train.replay_order import SLOT, ReplayOrder
from recover.train.script_replay import RecordedScript, checkpoints_of, launch_script, script_of
from recover.train.streams import open_streams

BEFORE = "parameters_before"
# Fields of a step that do not depend on which replicas computed it.
COMPARED = (BEFORE, "data_digest", "contents", "microbatches", "lr", "loss", "grad_norm", "skipped")
# Facts that must be the same here as on the machine of the run.
_HARDWARE = {"torch": "torch", "processor": "the processor", "threads": "the number of threads"}
# Facts of a launch that a replay needs, and their types.
_RECORDED = {
    **dict.fromkeys(("torch", "processor", "data"), str),
    **dict.fromkeys(("threads", "replica_size"), int),
    "nondeterministic": list,
}
WORDS = "words"  # of the sums: recorded since each parameter has an exponent of its own
_ENDED_BY_SIGNAL = 128  # exit codes of launches above it


class RanksFailedError(ConfigError):
    """The ranks of a replay have failed. Their logs are kept."""


class ReplayStopped(SystemExit):
    """A signal has ended a replay; the command ends with the code of the signal."""


@dataclass(frozen=True)
class Replay:
    """Steps to compute again: of a run of `recover train`, which has a configuration, or of a script."""

    run: Run
    config: Config | None
    checkpoint: directory.Found | None  # None: from the beginning
    step: int
    until: int
    slot: int | None = None
    script: RecordedScript | None = None

    @property
    def first(self) -> int:
        """The first step that is computed."""
        return self.checkpoint.step + 1 if self.checkpoint else 1


@dataclass(frozen=True)
class ReplayDifference:
    """A value that the replay computed differently."""

    step: int  # the step whose computation differs
    text: str


@dataclass
class ReplayOutcome:
    """The result of a replay."""

    compared: list[int] = field(default_factory=list)  # steps
    differences: list[ReplayDifference] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)  # of the parameters before each step, as computed
    slot: Line | None = None


def prepare(run_dir: Path, step: int, until: int | None = None, slot: int | None = None) -> Replay:
    """Check what can be checked before a process is started. Raises ConfigError."""
    (run,) = read_runs([run_dir])
    config = _config_of(run)
    until = step if until is None else until
    recorded = [line["step"] for line in run.steps]
    if not recorded or not recorded[0] <= step <= until <= recorded[-1]:
        known = f"steps {recorded[0]} to {recorded[-1]}" if recorded else "no step"
        raise ConfigError(
            f"steps {step} to {until} were asked for, and {run_dir} has recorded {known}; name those"
        )
    if slot is not None and config is None:
        raise ConfigError(
            f"--slot {slot}: {run_dir} is a run of a script, which only computes whole steps; leave --slot out"
        )
    if slot is not None and config is not None and not 0 <= slot < config.global_batch:
        raise ConfigError(
            f"--slot {slot}: a step has the slots 0 to {config.global_batch - 1}; name one of them"
        )
    near = [found for found in _checkpoints(run) if found.step < step]
    if not near and recorded[0] > 1:
        raise ConfigError(
            f"{run_dir} begins with step {recorded[0]}, from a checkpoint of another run, and has no checkpoint before "
            f"step {step}; copy step-{recorded[0] - 1} of that run to its checkpoints, or replay that run"
        )
    replay = Replay(run, config, near[-1] if near else None, step, until, slot)
    if config is not None:
        _refuse_other_environment(replay, config)
    else:
        replay = replace(replay, script=script_of(run, replay.first, until))
    if replay.checkpoint:
        replay.checkpoint.verify()
    return replay


def _checkpoints(run: Run) -> list[directory.Found]:
    return directory.all_good(run.path) if run.config else checkpoints_of(run)


def _config_of(run: Run) -> Config | None:
    """The configuration of the run, if its steps can be computed again; None for a run of a script. Raises
    ConfigError."""
    if not run.config:
        return None
    config = Config.model_validate(run.config)
    needed = {"reduction": "reproducible", "samples": "exact"}
    for key, value in needed.items():
        if (given := getattr(config, key)) != value:
            raise ConfigError(
                f"{run.path} was run with {key}={given}, so its bits depend on who computed what, and no other run "
                f"has them; only runs with {' and '.join(f'{k}={v}' for k, v in needed.items())} can be replayed"
            )
    if config.policy == "adaptive":
        raise ConfigError(
            f"{run.path} was run with policy=adaptive, whose batch depends on the replicas that lived; only runs with "
            "a constant batch can be replayed"
        )
    return config


def _refuse_other_environment(replay: Replay, config: Config) -> None:
    run = replay.run
    found = environments_of(run.path, replay.first, min(replay.until + 1, run.steps[-1]["step"]))
    if not found:
        raise ConfigError(
            f"{run.path} has no environment.json for steps {replay.first} to {replay.until}, so nobody knows on which "
            "hardware and torch they were computed; it was written by an earlier version of recover, or cut"
        )
    here = _environment_here(config)
    for theirs in found:
        _refuse_damaged(run.path / ENVIRONMENT, theirs)
        for key, name in _HARDWARE.items():
            if theirs[key] != here[key]:
                raise ConfigError(
                    f"{name} of the run is {theirs[key]}, and here it is {here[key]}: other kernels have other bits; "
                    "replay it where it was run"
                )
        if WORDS not in theirs:
            raise ConfigError(
                f"steps of {run.path} were computed by an earlier version of recover, whose reproducible sums had one "
                "exponent for all gradients, and so other bits than those of this version; replay them with that one"
            )
        if theirs["replica_size"] != config.replica_size:
            raise ConfigError(
                f"steps of {run.path} were computed by replicas of {theirs['replica_size']} ranks, and config.yaml "
                f"has replicas of {config.replica_size}: the run was resumed in another shape, with other bits"
            )
        for key, value in theirs.get("update", {}).items():
            if (given := getattr(config, key, None)) != value:
                raise ConfigError(
                    f"steps of {run.path} were computed with {key}={value}, and config.yaml has {key}={given}, from a "
                    "later launch of the run: only steps of launches with the keys of the last one can be replayed"
                )
        if theirs["nondeterministic"]:
            raise ConfigError(
                f"the run used {', '.join(theirs['nondeterministic'])}, which torch computes in no fixed order on "
                "this hardware: the run was not reproducible"
            )
    data = open_streams(config)[0].fingerprint()
    if data != found[-1]["data"]:
        raise ConfigError(
            f"the data of the run was {found[-1]['data']}, and data.path is {data} now; restore it, or start this "
            "command in the directory in which the run was started"
        )


def _refuse_damaged(path: Path, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError if a launch in `environment.json` lacks what a replay needs."""
    for key, kind in {**_RECORDED, "update": dict}.items():
        if key == "update" and key not in facts:  # of an earlier version
            continue
        if not isinstance(facts.get(key), kind):
            raise ConfigError(
                f"{path} is damaged: {key!r} of a launch is {facts.get(key)!r}, not of type {kind.__name__}; restore "
                "it from a copy of the run"
            )


def _environment_here(config: Config) -> dict[str, Any]:
    import torch

    from recover.job.machine import processor
    from recover.train.device import pick_device

    cuda = pick_device(config.device).type == "cuda"
    return {
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name() if cuda else processor(),
        "threads": config.threads,
    }


def refuse_used(output: Path | None) -> None:
    """Raise ConfigError if the directory for the files of a replay holds files already."""
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} holds files already; give a new or an empty directory")


def compute(replay: Replay, output: Path | None = None) -> ReplayOutcome:
    """Compute the steps again, and compare them. Raises RanksFailedError, or ReplayStopped."""
    last = replay.run.steps[-1]["step"]
    # One step more shows the parameters after the last one that was asked for.
    until = min(replay.until + 1, last) if replay.slot is None else replay.step - 1
    with _place(output) as where:
        if replay.script is not None:
            _finish(launch_script(replay.script, until, replay.checkpoint, where), where)
            _refuse_other_threads(replay.script, where)
        else:
            assert replay.config is not None
            _launch(replay.config, replay.checkpoint, ReplayOrder(until, replay.slot), where)
        lines = {line["step"]: line for line in read_lines(where / "steps.jsonl")}
        if replay.slot is None and until not in lines:
            _ended_early(max(lines, default=0), until, where)
        outcome = _compare(replay, lines, _summary(where))
        if replay.slot is not None:
            outcome.slot = json.loads((where / SLOT).read_text())
    return outcome


@contextmanager
def _place(output: Path | None) -> Iterator[Path]:
    """The directory for the files of a replay: a temporary one without `output`. It stays if the ranks fail: the
    launcher's message then names the logs in it."""
    if output is not None:
        yield output
        return
    where, is_kept = Path(tempfile.mkdtemp(prefix="recover-replay-")), False
    try:
        yield where
    except RanksFailedError:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(where, ignore_errors=True)


def _refuse_other_threads(script: RecordedScript, where: Path) -> None:
    for facts in environments(where).values():
        if facts["threads"] != script.threads:
            raise ConfigError(
                f"the ranks of the run had {script.threads} threads each, and in the replay the script has set "
                f"{facts['threads']}: other numbers of threads have other bits; set torch.set_num_threads alike"
            )


def _launch(config: Config, checkpoint: directory.Found | None, order: ReplayOrder, where: Path) -> None:
    from recover.train.config import Checkpoint, Eval, Log, Straggler

    config = config.model_copy(
        update={
            "replicas": 1,
            "accum": config.global_batch,
            "policy": "balanced",
            "pace": 0.0,
            "verify": 0,
            "min_replicas": 1,
            "faults": None,
            "checkpoint": Checkpoint(every=0),
            "eval": Eval(every=0, fraction=config.eval.fraction),
            "log": Log(tensorboard=False),
            "straggler": Straggler(),
        }
    )
    start = str(checkpoint.path.absolute()) if checkpoint else ""
    request = LaunchRequest(
        Path(__file__).with_name("rank_script.py"),
        [config.model_dump_json(), start, order.to_json()],
        config.replica_size,
        where,
        config.timeout,
        carrier=config.carrier,
        faults=[],
    )
    _finish(launch(config.replica_size, request), where)


def _finish(code: int, where: Path) -> None:
    """Raises ReplayStopped or RanksFailedError unless the ranks of a replay have succeeded."""
    if code > _ENDED_BY_SIGNAL:
        raise ReplayStopped(code)
    if code:
        raise RanksFailedError(
            f"the ranks that computed the steps again ended with exit code {code}; see {where}/ranks, and remove "
            f"{where} afterwards"
        )


def _ended_early(last: int, until: int, where: Path) -> NoReturn:
    """Raise RanksFailedError: steps that were not computed must not pass for equal."""
    when = f"after step {last}" if last else "before its first step"
    raise RanksFailedError(
        f"the replay has ended {when} without an error, and was to compute step {until}: which steps the script takes "
        "depends on more than its command, as on a checkpoint that it loads by itself, or on variables of the "
        f"environment, which are not recorded; start the replay with those of the run. See {where}/ranks, and remove "
        f"{where} afterwards"
    )


def _summary(where: Path) -> Line:
    try:
        found: Line = json.loads((where / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _compare(replay: Replay, computed: Mapping[int, Line], summary: Line) -> ReplayOutcome:
    outcome = ReplayOutcome(digests={number: line.get(BEFORE, "") for number, line in computed.items()})
    for line in replay.run.steps:
        number = line["step"]
        if number not in computed:
            continue
        # Of the step after the last requested one, only the parameters that it began with are compared.
        for key in COMPARED if number <= replay.until else (BEFORE,):
            was, found = line.get(key), computed[number].get(key)
            if was != found:
                by = number - 1 if key == BEFORE and number > replay.first else number
                outcome.differences.append(
                    ReplayDifference(by, f"step {number}: {key} was {was!r}, and is {found!r}")
                )
        if number <= replay.until:
            outcome.compared.append(number)
    theirs, end = replay.run.summary, replay.until
    if (
        computed
        and theirs.get("steps") == summary.get("steps") == end
        and theirs.get("parameters_digest") != summary.get("parameters_digest")
    ):
        text = f"the parameters after step {end} are not those of summary.json"
        outcome.differences.append(ReplayDifference(end, text))
    return outcome


def audit(run_dir: Path, segments: int, seed: int) -> dict[str, Any]:
    """Compute random segments of a run again, and write the report to `audit-SEED.json` in it.

    A segment begins behind a checkpoint, or at the beginning, and ends with a step that was drawn. Segments from one
    checkpoint are computed together. Returns the report, with `sha256` and `path`.
    """
    (run,) = read_runs([run_dir])
    _config_of(run)
    recorded = [line["step"] for line in run.steps]
    if not recorded:
        raise ConfigError(f"{run_dir} has recorded no step: there is nothing to audit")
    drawn = sorted(random.Random(seed).sample(recorded, min(segments, len(recorded))))
    starts = [found.step for found in _checkpoints(run)]
    together: dict[int, list[int]] = {}  # steps that were drawn, by the checkpoint before them
    for step in drawn:
        together.setdefault(max((start for start in starts if start < step), default=0), []).append(step)
    replays = [
        prepare(run_dir, steps[0], steps[-1]) for steps in together.values()
    ]  # all are prepared before the first one is computed
    results: list[dict[str, Any]] = []
    for replay, steps in zip(replays, together.values(), strict=True):
        outcome = compute(replay)
        for step in steps:
            wrong = [each.text for each in outcome.differences if each.step <= step]
            results.append(
                {
                    "first": replay.first,
                    "last": step,
                    BEFORE: outcome.digests[step],
                    "equal": not wrong,
                    "differences": wrong,
                }
            )
    report: dict[str, Any] = {
        "run": str(run_dir.absolute()),
        "steps": recorded[-1],
        "seed": seed,
        "recover": recover_version(),
        "environment": environments_of(run_dir, drawn[0], drawn[-1]),
        "segments": results,
        "equal": all(result["equal"] for result in results),
    }
    path = run_dir / f"audit-{seed}.json"
    text = json.dumps(report, indent=2, sort_keys=True).encode() + b"\n"
    digest = hashlib.sha256(text).hexdigest()
    path.write_bytes(text)
    path.with_suffix(".json.sha256").write_text(f"{digest}  {path.name}\n")
    return report | {"sha256": digest, "path": path}
