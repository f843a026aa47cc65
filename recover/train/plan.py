"""What is settled before any process starts: the configuration, where the run lives, and everything that would fail."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from recover.data import Stream, check_corpus, open_stream
from recover.faults import Kill, parse_kill, parse_kills
from recover.train import checkpoint
from recover.train.config import Config, ConfigError, flatten, parse, read_file, read_words

# What a checkpoint is bound to: with another one of these, going on would be another run.
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


@dataclass(frozen=True)
class Plan:
    config: Config
    run_dir: Path
    resume: checkpoint.Found | None
    kills: tuple[Kill, ...]
    stream: Stream


def make_plan(words: Sequence[str], run_dir: Path | None, kills: Sequence[str], resume: Path | None) -> Plan:
    """Raises ValueError, in a sentence, for whatever can be known now."""
    found = _find(resume) if resume else None
    given: dict[str, Any] = {}
    if words and "=" not in words[0]:
        given, words = read_file(Path(words[0])), words[1:]
    given |= read_words(words)
    if found:
        before = dict(flatten(found.facts()["config"]))
        del before["accum"]  # follows from B and the number of replicas
        given = {**before, **given}
    config = parse(given)
    schedule = (*parse_kills(kills), *_read_faults(config.faults))
    _check_kills(schedule, config)
    _check_extras(config)
    corpus = config.data.path, config.tokenizer, config.seq_len, config.microbatch_size
    check_corpus(*corpus, config.global_batch, config.eval.fraction)
    stream, _ = (
        open_stream(*corpus, config.seed, split, config.eval.fraction) for split in ("train", "heldout")
    )
    where = run_dir or resume or Path("runs", f"train-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')[:-3]}")
    if where.exists() and not where.is_dir():
        raise ConfigError(f"--run-dir {where} is a file; give a directory, or a name that is not taken")
    goes_on = resume is not None and where.resolve() == resume.resolve()
    if not goes_on and (where / "steps.jsonl").exists():
        raise ConfigError(
            f"{where} holds a run already; go on with it by --resume {where}, or give another --run-dir"
        )
    if found:
        _check_resume(config, found, stream)
    if config.model.endswith(".json") or config.checkpoint.every:
        _check_model_and_room(config, stream, where)
    return Plan(config, where.absolute(), found, schedule, stream)


def _find(run_dir: Path) -> checkpoint.Found:
    if not run_dir.is_dir():
        raise ConfigError(
            f"--resume {run_dir}: there is no such directory; give that of the run to go on with"
        )
    found = checkpoint.latest(run_dir)
    if found is None:
        raise ConfigError(f"--resume {run_dir}: it holds no whole checkpoint; start again without --resume")
    return found


def _check_resume(config: Config, found: checkpoint.Found, stream: Stream) -> None:
    from recover.train.shape import shape_of

    facts = found.facts()
    before, now = dict(flatten(facts["config"])), dict(flatten(config.model_dump()))
    for key in FIXED:
        if before[key] != now[key]:
            raise ConfigError(
                f"{found.path} was written with {key}={before[key]}, and this run asks for {key}={now[key]}; "
                "a run goes on with what it was started with"
            )
    shape = asdict(shape_of(config, stream.vocab))
    if differing := [
        f"{name} {facts['model'][name]}, not {shape[name]}"
        for name in shape
        if facts["model"][name] != shape[name]
    ]:
        raise ConfigError(
            f"{found.path} is a checkpoint of another model ({', '.join(differing)}); "
            "give the model that it was made with"
        )
    if found.step >= config.steps:
        raise ConfigError(
            f"{found.path} has all {config.steps} steps already; give more, as steps={config.steps * 2}"
        )


def _check_model_and_room(config: Config, stream: Stream, run_dir: Path) -> None:
    from recover.train.shape import parameters_of, shape_of

    parameters = parameters_of(shape_of(config, stream.vocab))
    per_parameter = 12 if config.optimizer == "adamw" else 8
    need = parameters * per_parameter * (config.checkpoint.keep + 1) if config.checkpoint.every else 0
    place = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise ConfigError(
            f"{config.checkpoint.keep + 1} checkpoints take {need / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB "
            "left; make room, give another --run-dir, or lower checkpoint.keep"
        )


def _check_extras(config: Config) -> None:
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("log.wandb needs the package wandb, which is not installed; `pip install wandb`")
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device='cuda': torch sees no GPU here; use device=cpu")


def _check_kills(kills: Sequence[Kill], config: Config) -> None:
    for kill in kills:
        if kill.replica >= config.replicas:
            raise ConfigError(
                f"kill {kill}: there are replicas 0 to {config.replicas - 1}, and no {kill.replica}"
            )
        if kill.local:
            raise ConfigError(
                f"kill {kill}: a replica is one process; write {kill.step}:{kill.replica}:{kill.location}"
            )
        if kill.step > config.steps:
            raise ConfigError(f"kill {kill}: the run has {config.steps} steps; choose one of them")


def _read_faults(path: str | None) -> list[Kill]:
    """A list of `{step, replica, location}`, with `local` where a replica has several ranks."""
    if path is None:
        return []
    try:
        entries = yaml.safe_load(Path(path).read_text())
        return [
            parse_kill(f"{e['step']}:{e['replica']}.{e.get('local', 0)}:{e['location']}")
            for e in entries or []
        ]
    except OSError as error:
        raise ConfigError(f"faults={path!r} cannot be read ({error.strerror}); check the path") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"faults={path!r} must be a YAML list like `- {{step: 3, replica: 1, location: in-reduce}}`; found: {error}"
        ) from None
