"""The configuration of `recover train`: refusals before any process starts, and derived values."""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from training import SHAPE, small_world
from typer.testing import CliRunner

from recover.checkpoint import directory
from recover.cli import app
from recover.job.config_keys import ConfigError, read_file
from recover.job.host_options import HostOptions
from recover.job.spec import JobSpec
from recover.launch.hosts.options import HostPart, read_options
from recover.launch.preflight import Refusal
from recover.train.config import MODELS, parse
from recover.train.model_shape import parameters_of, shape_of
from recover.train.models import SIZES, Llama
from recover.train.preparation import FIXED, prepare_run
from recover.train.supervision import _check_hosts, train


def refusal(*words: str, place: Path, kills: tuple[str, ...] = (), resume: Path | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        prepare_run([*small_world(place), *words], place / "run", kills, resume)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stepz=5"], "there is no key 'stepz'; did you mean 'steps'?"),
        (["checkpoint.evry=5"], "did you mean 'checkpoint.every'?"),
        (["eval=5"], "'eval' is a group of keys"),
        (["policy=balancd"], "did you mean 'balanced'?"),
        (["steps=many"], "steps='many' must be a whole number"),
        (["steps=0"], "steps='0' must be greater than 0"),
        (["lr=-1"], "lr='-1' must be greater than 0"),
        (["lr=nan"], "lr='nan' must be a finite number"),
        (["accum=x"], "accum='x' must be a whole number"),
        (["log.tensorboard=perhaps"], "must be true or false"),
        (["parallel=4d"], "parallel='4d' must be 'ddp', 'hsdp' or '3d'; did you mean '3d'?"),
        (["policy=static"], "samples=partitioned"),
        (["model=tinny"], "did you mean 'tiny'?"),
        (["min_replicas=9"], "min_replicas=9 is more than replicas=4"),
        (["replicas=4", "accum=5", "global_batch=16"], "leave accum out"),
        (["replicas=9", "global_batch=8"], "more than the 8 microbatches"),
        (["seq_len=65"], "more than the 64 positions"),
        (["data.path=/nowhere/at/all"], "/nowhere/at/all"),
        (["microbatch_size=500", "accum=50"], "too few for one step"),
        (["faults=/nowhere"], "faults='/nowhere' cannot be read"),
        (["log.wandb=mine"], "pip install wandb"),
        (["device=cuda"], "sees no GPU"),
        (["reduction_bits=16"], "reduction_bits=16 must be 64 or 32"),
        (["reduction_bits=wide"], "reduction_bits='wide' must be 64 or 32"),
        (["reduction_bits=32"], "belongs to reduction=reproducible, and reduction is fast"),
        (["reduction_bits=32", "reduction=reproducible", "accum=65"], "use reduction_bits=64"),
        (["novalue"], "key=value"),
    ],
)
def test_train_config_refuses_impossible_values_with_the_remedy(
    tmp_path: Path, words: list[str], said: str
) -> None:
    assert said in refusal(*words, place=tmp_path)


@pytest.mark.parametrize(
    ("kill", "said"),
    [
        ("3:4:vote", "replicas 0 to 3"),
        ("61:0:vote", "60 steps"),
        ("3:0.1:vote", "one process"),
        ("3:0:vot", "did you mean 'vote'?"),
    ],
)
def test_kill_that_cannot_strike_is_refused(tmp_path: Path, kill: str, said: str) -> None:
    assert said in refusal(place=tmp_path, kills=(kill,))


def test_yaml_values_are_read_as_intended(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("lr: 3e-4\nclip: null\nlog: {tensorboard: no}\nsteps: 010\ncheckpoint.every: 7\n")
    config = parse(read_file(file))
    assert (config.lr, config.clip, config.log.tensorboard, config.steps) == (3e-4, None, False, 10)
    assert config.checkpoint.every == 7
    assert parse(read_file_of(config.to_yaml(), tmp_path)) == config


def read_file_of(text: str, place: Path) -> dict[str, object]:
    (place / "again.yaml").write_text(text)
    return read_file(place / "again.yaml")


def test_batch_follows_from_the_replicas_unless_it_is_given() -> None:
    assert parse({"replicas": "3", "accum": "5"}).global_batch == 15
    assert parse({"replicas": "3", "global_batch": "16"}).accum == 6


def test_model_names_are_those_of_the_reference_llama() -> None:
    assert {name: shape.seq_len for name, shape in SIZES.items()} == MODELS
    assert parse({"model": "1b"}).seq_len == 4096
    assert parse({"model": "1b", "seq_len": "512"}).seq_len == 512


@pytest.mark.parametrize("tied", [False, True])
def test_huggingface_config_selects_a_model(tmp_path: Path, tied: bool) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SHAPE, "tie_word_embeddings": tied, "rope_theta": 5e5}))
    shape = shape_of(parse({"model": str(file), "seq_len": "64"}), vocab=256)
    assert (shape.dim, shape.layers, shape.kv_heads, shape.rope_theta) == (32, 1, 1, 5e5)
    assert parameters_of(shape) == sum(p.numel() for p in Llama(shape).parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "not 'llama'"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling"),
        ({"hidden_act": "gelu"}, "other than silu"),
        ({"hidden_size": 33}, "not a multiple of heads"),
        ({"vocab_size": 100}, "only 100"),
    ],
)
def test_model_other_than_the_reference_llama_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SHAPE, **change}))
    with pytest.raises(ConfigError, match=said):
        shape_of(parse({"model": str(file), "seq_len": "64"}), vocab=256)


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (["train", "--steps", "5"], "recover train: --steps is a key, not an option; write steps=5"),
        (["train", "lr=1", "--seq_len=64"], "write seq_len=64"),
        (["train", "--eval.fraction", "0.1", "steps=5"], "write eval.fraction=0.1"),
        (["train", "--lr", "--otel"], "write lr=VALUE"),
        (["simulate", "--gpus", "64"], "recover simulate: --gpus is a key, not an option; write gpus=64"),
        (["simulate", "--job.parameters=8e9"], "write job.parameters=8e9"),
        (["train", "--stepz", "5"], "No such option: --stepz"),
        (["train", "--run-dir"], "'--run-dir' requires an argument"),
    ],
)
def test_key_given_as_an_option_is_shown_as_it_is_written(words: list[str], mend: str) -> None:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert mend in result.stderr, result.stderr


def test_too_short_text_is_refused_by_the_keys_of_the_command(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    result = CliRunner().invoke(app, ["train", f"data.path={text}", "seq_len=1000", "--dry-run"])
    assert result.exit_code == 2
    assert "use more text, a smaller seq_len or microbatch_size, or another eval.fraction" in result.stderr


def test_dry_run_shows_grid_memory_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*small_world(tmp_path), "replicas=3", "accum=4", "policy=static", "samples=partitioned"]
    assert train(words, tmp_path / "run", ["2:1:vote"], None, dry_run=True) == 0
    text = capsys.readouterr().out
    for expected in ("3 replicas of 1 rank", "optimizer (adamw)", "3 alive: 3 major x 4 = 12", "2:1.0:vote"):
        assert expected in text
    assert not (tmp_path / "run").exists()


def test_schedule_file_adds_to_the_kills(tmp_path: Path) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text(
        "- {step: 3, replica: 1, location: in-reduce}\n- {step: 4, replica: 2, location: vote}\n"
    )
    words = [*small_world(tmp_path), f"faults={faults}"]
    prepared = prepare_run(words, tmp_path / "run", ["5:0:update"], None)
    assert [str(kill) for kill in prepared.kills] == ["5:0.0:update", "3:1.0:in-reduce", "4:2.0:vote"]
    faults.write_text("- {step: 3}\n")
    assert "must be a YAML list like" in refusal(f"faults={faults}", place=tmp_path)


def test_directory_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps.jsonl").write_text("")
    assert "--resume" in refusal(place=tmp_path)


def test_disk_without_room_for_the_checkpoints_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "make room" in refusal("checkpoint.every=5", place=tmp_path)


def pretend_checkpoint(place: Path, *words: str) -> Path:
    """The JSON files of a checkpoint, which are all that is read before the start."""
    prepared = prepare_run([*small_world(place), *words], place / "old", (), None)
    path = place / "old" / "checkpoints" / "step-4"
    path.mkdir(parents=True)
    shape = asdict(shape_of(prepared.config, prepared.stream.vocab))
    facts = {"format": directory.FORMAT, "config": prepared.config.model_dump(), "model": shape, "files": {}}
    (path / directory.FACTS).write_text(json.dumps(facts))
    return place / "old"


def test_resume_keeps_B_on_any_number_of_replicas(tmp_path: Path) -> None:
    old = pretend_checkpoint(tmp_path, "replicas=4", "accum=4", "steps=8")
    for replicas, accum in ((1, 16), (3, 6), (5, 4), (16, 1)):
        config = prepare_run([f"replicas={replicas}"], None, (), old).config
        assert (config.global_batch, config.accum, config.steps) == (16, accum, 8)


def hosts(nnodes: str, ranks: int) -> HostPart:
    options = {"nnodes": nnodes, "nproc_per_node": str(ranks), "rdzv_endpoint": "h1:1", "rdzv_id": "j"}
    return read_options(HostOptions(**options, host_name="h1"))


@pytest.mark.parametrize("replicas", ["", "replicas=3"])
def test_replicas_of_several_hosts_follow_from_their_ranks_or_are_given(
    tmp_path: Path, replicas: str
) -> None:
    """If the number is given, hosts may bring different numbers of ranks: the sum is compared after the rendezvous."""
    part = hosts("2", 1)
    words = [*small_world(tmp_path / "world"), "accum=2", *filter(None, [replicas])]
    run = prepare_run(words, tmp_path / "run", [], None, slots=2)
    assert (run.config.replicas, run.replicas_asked) == ((3, True) if replicas else (2, False))
    _check_hosts(run, part, JobSpec(run.config.replicas))
    for brought in (run.config.replicas - 1, run.config.replicas + 1):
        with pytest.raises(
            Refusal, match=rf"bring ranks for {brought} replicas of 1; .* replicas={brought}$"
        ):
            _check_hosts(run, part, JobSpec(brought))
    _check_hosts(run, part, JobSpec(1, joining=True))
    _check_hosts(run, hosts("1:2", 1), JobSpec(1))  # fewer hosts may come


def test_resume_on_other_hosts_takes_as_many_replicas_as_they_have(tmp_path: Path) -> None:
    """It does not take the number in the checkpoint; a number on the command line counts."""
    old = pretend_checkpoint(tmp_path, "replicas=4", "accum=4", "steps=8")
    run = prepare_run([], None, [], old, slots=2)
    assert (run.config.replicas, run.config.global_batch, run.replicas_asked) == (2, 16, False)
    assert prepare_run(["replicas=3"], None, [], old, slots=2).config.replicas == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replicas=2", "accum=4"], "8 microbatches a step, but global_batch is 16"),
        (["global_batch=32"], "global_batch=16"),
        (["seed=1"], "seed=0"),
        (["samples=partitioned"], "samples=exact"),
        (["model=tiny"], "another model (dim 32, not 256"),
        (["steps=4"], "all 4 steps already"),
    ],
)
def test_resume_as_another_run_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    old = pretend_checkpoint(tmp_path, "replicas=4", "accum=4", "steps=8")
    with pytest.raises(ConfigError) as caught:
        prepare_run(words, None, (), old)
    assert said in str(caught.value)


@pytest.mark.parametrize("key", FIXED)
def test_resume_reads_a_checkpoint_from_before_a_key_existed(tmp_path: Path, key: str) -> None:
    """Such a checkpoint was written with the key's default."""
    old = pretend_checkpoint(tmp_path, "steps=8", "seq_len=128", "model=tiny")
    (path,) = old.glob(f"checkpoints/*/{directory.FACTS}")
    facts = json.loads(path.read_text())
    *parts, last = key.split(".")
    del functools.reduce(dict.__getitem__, parts, facts["config"])[last]
    path.write_text(json.dumps(facts))
    assert prepare_run((), None, (), old).config.steps == 8
    if key == "seed":
        with pytest.raises(ConfigError, match="was written with seed=0, and this run asks for seed=1"):
            prepare_run(["seed=1"], None, (), old)


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refusal(place=tmp_path, resume=tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no whole checkpoint" in refusal(place=tmp_path, resume=tmp_path / "empty")


def test_impossible_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert "is a file" in refusal(place=tmp_path)
    assert os.path.isfile(tmp_path / "run")
