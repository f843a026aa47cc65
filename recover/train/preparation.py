"""Preparation of a run before any process starts: configuration, run directory, and checks of all that would fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from recover.checkpoint import directory
from recover.checkpoint.object_storage import ObjectStorage, StoredCheckpoint, is_url
from recover.data import Stream, check_corpus
from recover.faults import Fault, parse_faults
from recover.faults.schedule import check_schedule, read_schedule
from recover.job.config_keys import ConfigError, flatten, read
from recover.job.gpus import sharing_refused
from recover.job.optional_packages import need
from recover.runs.records.job_state import is_in_use
from recover.train.config import Config, parse
from recover.train.streams import open_streams

# Keys that a resumed run must share with its checkpoint: with other values it would be another run.
FIXED = (
    "global_batch",
    "microbatch_size",
    "seq_len",
    "samples",
    "optimizer",
    "tokenizer",
    "seed",
    "eval.fraction",
)
INSIDE = ("shard", "tp", "pp", "ep", "schedule")  # keys that only some replica layouts have


class RoomError(ConfigError):
    """The disk is too small."""


@dataclass(frozen=True)
class PreparedRun:
    """Everything that a launcher needs to start a run."""

    config: Config
    run_dir: Path
    resume: directory.Found | None
    kills: tuple[Fault, ...]
    stream: Stream
    doubts: tuple[str, ...] = ()  # reasons why this machine could not run it
    joins: bool = False  # the run directory belongs to the running job that this host joins
    replicas_asked: bool = False  # by the key `replicas`: hosts may bring different numbers of ranks


def prepare_run(
    words: Sequence[str],
    run_dir: Path | None,
    kills: Sequence[str],
    resume: Path | str | None,
    elsewhere: bool = False,
    slots: int | None = None,
    joins: bool = False,
    later: int = 0,
) -> PreparedRun:
    """Check everything that can be checked before a process is started. Raises ValueError.

    `elsewhere`: a dry run for another machine, with another corpus and another disk; what this machine lacks is then a
    doubt, not an error. `slots`: the number of ranks on all hosts, if each has as many as this one. `later`:
    replicas that may be started after the first ones. `resume`: a run directory, or a URL.
    """
    new = Path("runs", f"train-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')[:-3]}")
    source: ObjectStorage | None = None
    if isinstance(resume, str) and is_url(resume):
        source, resume = ObjectStorage(resume), run_dir or new
    resume = Path(resume) if resume else None
    found = _find(resume, run_dir or resume, slots is None, source, elsewhere) if resume else None
    given = read(words)
    if source:  # its config may name another prefix: that of a job which it was copied from
        given.setdefault("checkpoint.dir", source.url)
    asked = given.get("replicas")
    given = _over_checkpoint(given, found)
    config = parse(given) if slots is None else _filling(slots, given, asked is not None)
    schedule = (*parse_faults(kills), *(read_schedule(config.faults) if config.faults else ()))
    every, verify, exact = config.checkpoint.every, config.verify, config.reduction == "reproducible"
    check_schedule(schedule, config.replicas, config.replica_size, config.steps, every, later, verify, exact)
    _check_extras(config)
    doubts = _Doubts(allowed=elsewhere)
    with doubts.of(ConfigError):
        _check_gpus(config)
    if config.checkpoint.dir:
        with doubts.of(ValueError):
            check_object_storage(config.checkpoint.dir, is_new=not found and slots is None)
    corpus = config.data.path, config.tokenizer, config.seq_len, config.microbatch_size
    with doubts.of(ValueError):
        check_corpus(*corpus, config.global_batch, config.eval.fraction)
    stream, _ = open_streams(config)
    where = run_dir or resume or new
    _check_run_dir(where, resume, joins)
    if found:
        _check_resume(config, found, stream)
        if not elsewhere:
            found.verify()
    if config.model.endswith(".json") or config.checkpoint.every or config.parallel == "3d":
        with doubts.of(RoomError):
            _check_model_and_room(config, stream, where)
    doubted = tuple(doubts.texts)
    return PreparedRun(config, where.absolute(), found, schedule, stream, doubted, joins, asked is not None)


class _Doubts:
    """Errors that do not count in a dry run for another machine."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self.texts: list[str] = []

    @contextmanager
    def of(self, kind: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kind as error:
            if not self._allowed:
                raise
            self.texts.append(str(error))


def _over_checkpoint(given: dict[str, Any], found: directory.Found | None) -> dict[str, Any]:
    """The given keys over those of the checkpoint to resume from."""
    if found is None:
        return given
    before = dict(flatten(found.facts()["config"]))
    del before["accum"]  # follows from B and the number of replicas
    del before["faults"]  # they have struck already
    if given.get("parallel", before["parallel"]) != before["parallel"]:
        # Another replica layout has sizes of its own.
        before = {key: value for key, value in before.items() if key not in INSIDE}
    return {**before, **given}


def _check_run_dir(run_dir: Path, resume: Path | None, joins: bool) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir {run_dir} is a file; give a directory, or a name that is not taken")
    resumes = resume is not None and run_dir.resolve() == resume.resolve()
    if not resumes and not joins and (run_dir / "steps.jsonl").exists():
        raise ConfigError(
            f"{run_dir} holds a run already; go on with it by --resume {run_dir}, or give another --run-dir"
        )


def _filling(slots: int, given: dict[str, Any], is_asked: bool) -> Config:
    """A configuration with as many replicas as were asked for, or else as fit into the slots of all hosts. Each host is
    then assumed to have as many slots as this one."""
    if is_asked:  # compared with the ranks of the hosts after their rendezvous
        return parse(given)
    inside = {key: value for key, value in given.items() if key not in ("accum", "global_batch")}
    size = parse({**inside, "replicas": slots}).replica_size
    if not slots // size or slots % size:
        raise ConfigError(
            f"--nnodes and --nproc-per-node make {slots} ranks, which is {slots / size:g} replicas of {size}, and that "
            "is no whole number; make them fit, or give the key replicas if the other hosts have more or fewer ranks"
        )
    return parse({**given, "replicas": slots // size})


def check_object_storage(url: str, is_new: bool) -> None:
    """Raises ValueError if checkpoints cannot be uploaded to `url`, or, with `is_new`, if another run has uploaded
    there."""
    storage = ObjectStorage(url)
    storage.check()
    if is_new:
        storage.refuse_used()


def _find(
    run_dir: Path, target: Path, alone: bool, source: ObjectStorage | None, elsewhere: bool
) -> directory.Found:
    """The checkpoint to resume from. `target`: where the run goes on. `alone`: on this host; other hosts of the same
    job may have begun to use the directory. `source`: download it from there, but not for a dry run (`elsewhere`)."""
    if source:
        return _fetch(source, _stored_in(source, run_dir, alone), run_dir, elsewhere)
    if not run_dir.is_dir():
        raise ConfigError(
            f"--resume {run_dir}: there is no such directory; give that of the run to go on with"
        )
    found, is_used = directory.latest(run_dir), is_in_use(run_dir)
    if is_used and (found is None or (alone and target.resolve() == run_dir.resolve())):
        saved = f"its last checkpoint is of step {found.step}" if found else "it has saved no checkpoint yet"
        raise ConfigError(
            f"--resume {run_dir}: a running job uses it, and {saved}; wait until it ends, or stop it (Ctrl-C, or "
            "SIGTERM to its launcher: it saves a checkpoint first)"
            + (", or resume into another --run-dir" if found else "")
        )
    if found is None:
        raise ConfigError(f"--resume {run_dir}: it holds no whole checkpoint; start again without --resume")
    if url := found.facts()["config"].get("checkpoint", {}).get("dir"):
        # A host that was lost before the end of the run lacks the last checkpoints.
        storage = ObjectStorage(url)
        stored = storage.newest()
        if stored and stored.step > found.step:
            return _fetch(storage, stored, run_dir, elsewhere)
    return found


def _fetch(
    storage: ObjectStorage, stored: StoredCheckpoint, run_dir: Path, elsewhere: bool
) -> directory.Found:
    """The checkpoint in the run directory. A dry run (`elsewhere`) downloads its description only, and writes nothing
    there."""
    return storage.look_at(stored, run_dir) if elsewhere else storage.download(stored, run_dir)


def _stored_in(source: ObjectStorage, run_dir: Path, alone: bool) -> StoredCheckpoint:
    """The newest checkpoint in object storage, if it can be downloaded to this run directory."""
    stored = source.newest()
    if stored is None:
        raise ConfigError(
            f"--resume {source.url}: it holds no complete checkpoint; start again without --resume, with "
            f"checkpoint.dir={source.url}"
        )
    local = directory.latest(run_dir)
    if local and local.step > stored.step:
        raise ConfigError(
            f"--resume {source.url}: its newest checkpoint is of step {stored.step}, and {local.path} is newer; go on "
            f"from that by --resume {run_dir}, or give another --run-dir"
        )
    if (run_dir / "steps.jsonl").exists() and _url_of(run_dir) != source.url:
        raise ConfigError(
            f"--run-dir {run_dir} holds a run that does not upload to {source.url}; give another --run-dir"
        )
    if alone and is_in_use(run_dir):
        raise ConfigError(
            f"--run-dir {run_dir}: a running job uses it; wait until it ends, or give another one"
        )
    return stored


def _url_of(run_dir: Path) -> str | None:
    """The checkpoint.dir of the run in this directory."""
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        url = config["checkpoint"].get("dir")
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return None
    return str(url).rstrip("/") if url else None


def _check_resume(config: Config, found: directory.Found, stream: Stream) -> None:
    from recover.train.model_shape import shape_of

    facts = found.facts()
    # A checkpoint from before a key existed was written with what is its default today.
    before = dict(flatten(Config.model_construct().model_dump())) | dict(flatten(facts["config"]))
    now = dict(flatten(config.model_dump()))
    for key in FIXED:
        if before[key] != now[key]:
            raise ConfigError(
                f"{found.place} was written with {key}={before[key]}, and this run asks for {key}={now[key]}; "
                "a run goes on with what it was started with"
            )
    shape = asdict(shape_of(config, stream.vocab))
    if differing := [
        f"{name} {facts['model'][name]}, not {shape[name]}"
        for name in shape
        if facts["model"][name] != shape[name]
    ]:
        raise ConfigError(
            f"{found.place} is a checkpoint of another model ({', '.join(differing)}); "
            "give the model that it was made with"
        )
    if found.step >= config.steps:
        raise ConfigError(
            f"{found.place} has all {config.steps} steps already; give more, as steps={config.steps * 2}"
        )


def _check_model_and_room(config: Config, stream: Stream, run_dir: Path) -> None:
    from recover.train.model_shape import parameters_of, shape_of

    parameters = parameters_of(shape_of(config, stream.vocab))
    per_parameter = 12 if config.optimizer == "adamw" else 8
    need = parameters * per_parameter * (config.checkpoint.keep + 1) if config.checkpoint.every else 0
    place = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise RoomError(
            f"{config.checkpoint.keep + 1} checkpoints take {need / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB "
            "left; make room, give another --run-dir, or lower checkpoint.keep"
        )


def _check_extras(config: Config) -> None:
    if config.log.wandb:
        need("wandb", "log.wandb")
    if config.log.tensorboard:
        need("tensorboard", "log.tensorboard", "log.tensorboard=false")
    if config.compile:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise ConfigError(
                f"compile=true needs a C++ compiler, and there is no {compiler} in PATH; install one, name another by "
                "CXX, or leave compile out"
            )


def _check_gpus(config: Config) -> None:
    if config.device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no GPU here; use device=cpu")
    # The launcher checks the GPUs between replicas; inside a replica there is no alternative to NCCL.
    if config.replica_size > 1 and (why := sharing_refused(config.replicas * config.replica_size)):
        raise ConfigError(f"parallel={config.parallel} uses NCCL inside a replica: {why}")
