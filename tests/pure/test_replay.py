"""Digests of parameters and sample contents, refusals of a replay, and the first difference of two runs."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lone_world import BATCH, World, begin
from training import small_world

from recover.checkpoint.save_and_resume import resume, save
from recover.checkpoint.way_on import note_place
from recover.gradients.state_hash import WIDTH, StateHash
from recover.job.config_keys import ConfigError, flatten
from recover.job.machine import processor
from recover.job.script_replay import ScriptReplay
from recover.runs.records.environments import environments, environments_of, note_environment
from recover.runs.report.bisection import bisect
from recover.runs.report.recorded_runs import read_runs
from recover.step.in_flight import CHECKED, checksum
from recover.step.replica_digest import digest_of_replica, limbs_of
from recover.train import replay as replays
from recover.train.config import OF_UPDATES, parse
from recover.train.preparation import FIXED
from recover.train.replay import RanksFailedError, ReplayStopped, compute, prepare, refuse_used
from recover.train.streams import open_streams

NO_RUN = {"step": 1, "epoch": 0, "replicas": 1, "seconds": 1.0, "at": 0.0, "microbatches": 4}


def digest(tensors: list[torch.Tensor], others: list[torch.Tensor] | None = None, step: int = 1) -> bytes:
    found: list[bytes] = []
    whole = StateHash(step, b"", others is None)
    whole.add(others or [])
    _ = whole.value(lambda: others or [], lambda: tensors, found.append).value
    return found[0]


@pytest.mark.guarantee(
    "Replay", "The digest of the parameters has 128 bits and depends on nothing but the parameters."
)
def test_digest_follows_from_the_parameters_alone() -> None:
    large, small = torch.randn(3 * WIDTH), torch.randn(7)
    first = digest([large, small])
    assert len(first) == 16
    assert digest([large, small], others=[torch.randn(5)], step=9) == first
    assert digest([small, large]) != first
    for change in (lambda t: t[5:6].neg_(), lambda t: t[[1, 2]].copy_(t[[2, 1]])):
        other = large.clone()
        change(other)
        if not torch.equal(other, large):
            assert digest([other, small]) != first
    swapped = large.clone()
    swapped[[1, 2 * WIDTH]] = swapped[[2 * WIDTH, 1]]
    assert digest([swapped, small]) != first
    halves = [{digest([large, torch.full((1,), float(n))])[at : at + 8] for n in range(300)} for at in (0, 8)]
    assert [len(half) for half in halves] == [300, 300]  # each half distinguishes all of them


def test_digested_parameters_enter_the_fingerprint() -> None:
    """The drift check must find other parameters, whether or not their digest is recorded."""

    def hashed(parameter: torch.Tensor) -> int:
        return StateHash(1).value(lambda: (), lambda: [parameter]).value

    one = torch.randn(2 * WIDTH)
    assert hashed(one) == hashed(one.clone())
    assert hashed(one) != hashed(one.neg())


def test_digest_of_a_replica_depends_on_the_places_of_its_ranks() -> None:
    one, two = bytes(range(16)), bytes(range(16, 32))

    def of(*ranks: bytes) -> str:
        return digest_of_replica(np.sum([limbs_of(each, n) for n, each in enumerate(ranks)], axis=0).tolist())

    assert len({of(one), of(two), of(one, two), of(two, one), of(one, one)}) == 5
    assert len(of(one, two)) == 32


def test_checksum_covers_nested_tensors_of_host_memory() -> None:
    batch = {"tokens": torch.arange(6), "more": [np.arange(3), (torch.zeros(0), 2.5)], "text": "a"}
    first = checksum(batch)
    assert checksum({**batch, "tokens": torch.arange(6) + torch.tensor([0, 0, 1, 0, 0, 0])}) != first
    assert checksum({**batch, "more": [np.arange(3) + 1, (torch.zeros(0), 2.5)]}) != first
    assert checksum({**batch, "text": "b"}) != first
    assert checksum({**batch}) == first
    assert checksum(object()) == 0
    long = torch.zeros(CHECKED + 5, dtype=torch.uint8)
    assert checksum(long) == checksum(long[:CHECKED])


def line(step: int, **fields: Any) -> dict[str, Any]:
    known = {"data_digest": "d", "contents": "c", "lr": 0.1, "loss": 1.0, "grad_norm": 1.0}
    return NO_RUN | {"step": step, "parameters_before": f"p{step}", **known, **fields}


def write_run(path: Path, lines: list[dict[str, Any]], **config: Any) -> Path:
    path.mkdir()
    (path / "steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (path / "config.yaml").write_text(json.dumps({"global_batch": 4, "replicas": 1, **config}))
    return path


@pytest.mark.guarantee("Replay", "`recover bisect` names the first step that differs, and the cause.")
@pytest.mark.parametrize(
    ("changes", "step", "what", "words"),
    [
        ({3: {"contents": "x", "loss": 2.0}, 4: {"parameters_before": "x"}}, 3, "samples", "other contents"),
        ({3: {"data_digest": "x", "loss": 2.0}}, 3, "samples", "other sample numbers"),
        ({4: {"parameters_before": "x", "loss": 2.0}}, 4, "parameters", "the update of step 3"),
        ({1: {"parameters_before": "x"}}, 1, "parameters", "before step 1"),
        ({2: {"lr": 0.2}, 3: {"parameters_before": "x"}}, 2, "learning rate", "0.1 against 0.2"),
        ({2: {"grad_norm": 2.0}}, 2, "environment", "grad_norm 1.0 against 2.0"),
        ({}, 0, "", "no difference in steps 1 to 5"),
    ],
)
def test_bisect_names_the_first_step_and_what_differs(
    tmp_path: Path, changes: dict[int, dict[str, Any]], step: int, what: str, words: str
) -> None:
    one = write_run(tmp_path / "one", [line(n) for n in range(1, 6)], clip=1.0)
    two = write_run(tmp_path / "two", [line(n, **changes.get(n, {})) for n in range(1, 6)], clip=0.5)
    found = bisect(*read_runs([one, two]))
    assert (found.step, found.what) == (step, what)
    assert words in found.text
    assert found.causes == (("clip: 1.0 against 0.5",) if step else ())


def test_bisect_does_not_compare_digests_of_different_shapes(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [line(1)], parallel="ddp")
    two = write_run(tmp_path / "two", [line(1, parameters_before="x")], parallel="hsdp", shard=2)
    assert "different shapes" in bisect(*read_runs([one, two])).text


def recorded(tmp_path: Path, keys_given: tuple[str, ...] = (), /, **facts: Any) -> Path:
    """A run that could be replayed, except for these keys and `facts`."""
    keys = dict(
        word.split("=", 1)
        for word in (*small_world(tmp_path / "world"), "reduction=reproducible", *keys_given)
    )
    config = parse(keys)
    run_dir = write_run(tmp_path / "run", [line(n) for n in range(1, 6)])
    (run_dir / "config.yaml").write_text(config.to_yaml())
    here = {
        "torch": torch.__version__,
        "processor": processor(),
        "threads": config.threads,
        "replica_size": config.replica_size,
        "nondeterministic": [],
        "data": open_streams(config)[0].fingerprint(),
        "words": ["torch.float64"],
    }
    if facts != {"none": True}:
        known = {key: value for key, value in (here | facts).items() if value is not None}
        note_environment(run_dir, 1, known)
    return run_dir


@pytest.mark.guarantee(
    "Replay",
    "A replay is refused, before any process starts, for other hardware, torch, threads, data or replica shape, and "
    "for runs that were not reproducible.",
)
@pytest.mark.parametrize(
    ("words", "facts", "told"),
    [
        ((), {"torch": "1.0"}, "torch of the run is 1.0"),
        ((), {"processor": "abacus"}, "the processor of the run is abacus"),
        ((), {"threads": 7}, "the number of threads of the run is 7"),
        ((), {"replica_size": 2}, "replicas of 2 ranks"),
        ((), {"nondeterministic": ["scatter"]}, "the run used scatter"),
        ((), {"data": "another corpus"}, "the data of the run was another corpus"),
        ((), {"none": True}, "no environment.json"),
        ((), {"words": None}, "an earlier version of recover, whose reproducible sums had one exponent"),
        ((), {"update": {"lr": 3e-4, "steps": 7}}, "lr=0.0003, and config.yaml has"),
        ((), {"update": {"reduction_bits": 32}}, "reduction_bits=32, and config.yaml has reduction_bits=64"),
        (("reduction=fast",), {}, "reduction=fast"),
        (("samples=partitioned",), {}, "samples=partitioned"),
        (("policy=adaptive",), {}, "policy=adaptive"),
    ],
)
def test_replay_is_refused_where_bits_would_differ(
    tmp_path: Path, words: tuple[str, ...], facts: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        prepare(recorded(tmp_path, words, **facts), 3)


def test_keys_on_which_bits_depend_are_fixed_or_recorded_for_each_launch() -> None:
    """A run that was resumed with other values of such keys must not look as if it had computed wrong bits. Of the
    remaining keys, some only say which replica computes which slots, some have their results recorded, and some are
    compared with the checkpoint."""
    who = {
        "replicas",
        "accum",
        "policy",
        "verify",
        "join",
        "min_replicas",
        "pace",
        "carrier",
        "bucket_mb",
        "faults",
    }
    who |= {"timeout", "hang_limit", "link_timeout", "straggler.evict", "straggler.every"}
    no_part = {"eval.every", "eval.batches", "checkpoint.every", "checkpoint.keep", "checkpoint.dir"}
    no_part |= {"log.tensorboard", "log.wandb"}
    recorded, of_checkpoint = {"threads", "device", "data.path"}, {"model", "experts", "top_k"}
    keys = {key for key, _ in flatten(parse({}).model_dump())}
    assert keys - {*FIXED, *OF_UPDATES} == who | no_part | recorded | of_checkpoint


def test_replay_of_unknown_steps_slots_and_scripts_is_refused(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    assert prepare(run_dir, 2, 5).first == 1
    for steps, told in (
        ((6, None, None), "steps 1 to 5"),
        ((3, 9, None), "3 to 9"),
        ((3, None, 16), "--slot 16"),
    ):
        with pytest.raises(ConfigError, match=told):
            prepare(run_dir, *steps)
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"no environment.json with the command of its script"):
        prepare(run_dir, 3)


def recorded_script(tmp_path: Path, **facts: Any) -> Path:
    """A run of a script that could be replayed, except for `facts`."""
    run_dir = write_run(tmp_path / "run", [line(n) for n in range(1, 6)])
    (run_dir / "config.yaml").unlink(missing_ok=True)
    script = tmp_path / "script.py"
    script.write_text("pass")
    here = {
        "torch": torch.__version__,
        "processor": processor(),
        "threads": 1,
        "replica_size": 1,
        "global_batch": 6,
        "reduction": "reproducible",
        "samples": "exact",
        "policy": "balanced",
        "deterministic": False,
        "script": {"command": [str(script), "--lr", "1"], "directory": str(tmp_path)},
        "code": {"script.py": [str(script), sha256(b"pass").hexdigest()]},
    }
    note_environment(run_dir, 1, {key: value for key, value in (here | facts).items() if value is not None})
    return run_dir


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"torch": "1.0"}, "torch of the run is 1.0"),
        ({"processor": "abacus"}, "the processor of the run is abacus"),
        ({"reduction": "fast"}, "reduction='fast'"),
        ({"samples": "partitioned"}, "samples='partitioned'"),
        ({"policy": "adaptive"}, "policy='adaptive'"),
        ({"script": None}, "an earlier version of recover"),
        ({"script": {"command": [], "directory": "/"}}, "not started by `recover run`"),
        ({"global_batch": "6"}, "is damaged: 'global_batch'"),
        ({"script": {"command": ["script.py"], "directory": "/no/such"}}, "/no/such, which is not there"),
        ({"code": {"mine": ["/no/such.py", "0" * 64]}}, "loaded mine from /no/such.py, which cannot be read"),
        ({"code": {"mine": [__file__, "0" * 64]}}, "has changed since the run"),
    ],
)
def test_replay_of_a_script_is_refused_where_bits_would_differ(
    tmp_path: Path, facts: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        prepare(recorded_script(tmp_path, **facts), 3)


def test_replay_of_a_script_takes_the_checkpoint_before_the_step(tmp_path: Path) -> None:
    """This holds if the script resumes: a script that only saves starts from the beginning."""
    run_dir = recorded_script(tmp_path)
    assert prepare(run_dir, 3).first == 1
    with pytest.raises(ConfigError, match="leave --slot out"):
        prepare(run_dir, 3, slot=0)
    for step in (2, 3):
        place = tmp_path / "saved/checkpoints" / f"step-{step}"
        place.mkdir(parents=True)
        (place / "trainer.json").write_text(json.dumps({"format": 2, "files": {}}))
    for resumes, first in ((False, 1), (True, 3)):
        note_place(run_dir, tmp_path / "saved", resumes)
        assert prepare(run_dir, 3).first == first
    note_environment(run_dir, 4, environments_of(run_dir, 1, 3)[0] | {"replica_size": 2})
    with pytest.raises(ConfigError, match="name steps of one launch"):
        prepare(run_dir, 3, 4)
    assert prepare(run_dir, 2).script is not None


@pytest.mark.parametrize("changed", ["first launch", "second launch"])
def test_replay_of_a_script_needs_the_code_of_each_launch_that_has_taken_the_steps(
    tmp_path: Path, changed: str
) -> None:
    """The code of other launches does not matter: the step after the last requested one is only begun."""
    run_dir = recorded_script(tmp_path)
    facts = environments(run_dir)[1]
    other = facts | {"code": {"script.py": [str(tmp_path / "script.py"), "0" * 64]}}
    first, second = (other, facts) if changed == "first launch" else (facts, other)
    note_environment(run_dir, 1, first)
    note_environment(run_dir, 4, second)
    with pytest.raises(ConfigError, match=r"script.py has changed since the run"):
        prepare(run_dir, 3, 4)
    if changed == "first launch":
        with pytest.raises(ConfigError, match=r"script.py has changed since the run"):
            prepare(run_dir, 3)
    else:
        assert prepare(run_dir, 3).script is not None


def test_replay_of_a_script_needs_a_batch_that_does_not_follow_from_its_replicas(tmp_path: Path) -> None:
    """The rank checks this before its first step, because the batch is known only there."""
    order = ScriptReplay(until=4, global_batch=6, checkpoint=str(tmp_path / "step-3"))
    assert ScriptReplay.from_json(order.to_json()) == order
    assert ScriptReplay.from_json("") is None
    world = World()
    world.job = replace(world.job, replay=order.to_json())
    told = "a step of the run has 6 microbatches, and in this replay, on one replica, global_batch is 4"
    with pytest.raises(ValueError, match=told):
        begin(world, torch.nn.Linear(2, 1))


def test_replayed_script_ends_after_its_last_step_and_leaves_nothing(tmp_path: Path) -> None:
    world, called = World(), list[int]()
    world.job = replace(world.job, replay=ScriptReplay(until=2, global_batch=BATCH).to_json())
    model = torch.nn.Linear(2, 1)
    step = begin(world, model)
    assert resume(step, tmp_path) is None

    def script() -> None:
        while True:
            for batch in step.microbatches([torch.ones(1, 2)] * 100):
                step.backward(model(batch).sum())
            step.on_first(called.append, step.index)
            save(step, tmp_path)

    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 0
    assert step.index == 2
    assert not called
    assert not list(tmp_path.iterdir())


def test_replay_of_a_script_with_several_steps_is_refused(tmp_path: Path) -> None:
    run_dir = recorded_script(tmp_path)
    text = "".join(json.dumps(line(n) | {"part": 1 + n // 3, "own_step": n}) + "\n" for n in range(1, 6))
    (run_dir / "steps.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"several recover.Steps"):
        prepare(run_dir, 3)


def test_replay_of_a_run_that_began_elsewhere_needs_a_checkpoint(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    (run_dir / "steps.jsonl").write_text("".join(json.dumps(line(n)) + "\n" for n in range(7, 11)))
    with pytest.raises(ConfigError, match=r"begins with step 7.*copy step-6"):
        prepare(run_dir, 8)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"x": {}}', '{"1": []}', '{"1": {}}', '{"1": null}', b"\xff\xfe", "facts"],
    ids=repr,
)
def test_damaged_environment_is_refused_by_name(tmp_path: Path, text: str | bytes) -> None:
    """The file may have any content. `recover bisect` compares the steps without it, and the next launch replaces
    it."""
    run_dir = recorded(tmp_path)
    path = run_dir / "environment.json"
    sound = json.loads(path.read_text())
    damaged = [text]
    if text == "facts":
        kinds = ({"update": 7}, {"nondeterministic": "scatter"}, {"threads": "2"}, {"data": None})
        damaged = [json.dumps({"1": sound["1"] | kind}) for kind in kinds]
    for content in damaged:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(
            ValueError, match=r"environment.json is damaged.*restore it from a copy of the run"
        ):
            prepare(run_dir, 3)
        assert "no difference" in bisect(*read_runs([run_dir, run_dir])).text
    note_environment(run_dir, 2, sound["1"])
    assert environments(run_dir)[2] == sound["1"]


@pytest.mark.parametrize(
    ("code", "error"), [(1, RanksFailedError), (130, ReplayStopped), (143, ReplayStopped)]
)
def test_replay_that_fails_keeps_its_logs_and_one_that_is_stopped_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException]
) -> None:
    """A message names the logs of ranks that failed; Ctrl-C leaves nothing, and ends the command with its code."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(replays.tempfile, "tempdir", None)
    replay = prepare(recorded(tmp_path), 3)
    monkeypatch.setattr(replays, "launch", lambda ranks, request: (request.run_dir / "ranks").mkdir() or code)
    with pytest.raises(error) as raised:
        compute(replay)
    kept = list(tmp_path.glob("recover-replay-*"))
    if error is ReplayStopped:
        assert (raised.value.code, kept) == (code, [])  # type: ignore[attr-defined]
    else:
        (place,) = kept
        assert f"see {place}/ranks" in str(raised.value)
        assert (place / "ranks").is_dir()


@pytest.mark.guarantee("Replay", "A step that was not computed again does not count as equal.")
@pytest.mark.parametrize("computed", [0, 2, 3])
def test_replay_that_ends_early_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: int
) -> None:
    """The script takes fewer steps than in the run; the same holds if only the parameters after the step are
    missing."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(replays.tempfile, "tempdir", None)
    replay = prepare(recorded_script(tmp_path), 3)

    def launch(script: object, until: int, checkpoint: object, where: Path) -> int:
        assert until == 4
        write_run(where / "made", [line(n) for n in range(1, computed + 1)])
        (where / "made/steps.jsonl").rename(where / "steps.jsonl")
        return 0

    monkeypatch.setattr(replays, "launch_script", launch)
    told = (
        f"has ended {f'after step {computed}' if computed else 'before its first step'} .* to compute step 4"
    )
    with pytest.raises(RanksFailedError, match=told):
        compute(replay)
    assert list(tmp_path.glob("recover-replay-*/steps.jsonl")), "its files are kept"


def test_files_of_a_replay_replace_no_others(tmp_path: Path) -> None:
    refuse_used(None)
    refuse_used(tmp_path / "new")
    refuse_used(tmp_path)
    with pytest.raises(ConfigError, match=r"--output .*run holds files already"):
        refuse_used(recorded(tmp_path))


def test_environments_are_kept_by_the_first_step_of_each_launch(tmp_path: Path) -> None:
    for first, torch_version in ((1, "a"), (5, "b"), (9, "c"), (7, "d")):  # the third launch was rolled back
        note_environment(tmp_path, first, {"torch": torch_version})
    assert [each["torch"] for each in environments(tmp_path).values()] == ["a", "b", "d"]
    found = [[e["torch"] for e in environments_of(tmp_path, *span)] for span in ((1, 4), (4, 5), (6, 9))]
    assert found == [["a"], ["a", "b"], ["b", "d"]]
