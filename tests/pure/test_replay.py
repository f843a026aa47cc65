"""Digests of parameters and contents, refusals of a replay, and the first difference of two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import small_world

from recover.gradients.state_hash import WIDTH, StateHash
from recover.job.config_keys import ConfigError
from recover.job.machine import processor
from recover.runs.records.environments import environments, environments_of, note_environment
from recover.runs.report.bisection import bisect
from recover.runs.report.recorded_runs import read_runs
from recover.step.in_flight import CHECKED, checksum
from recover.step.replica_digest import digest_of_replica, limbs_of
from recover.train.config import parse
from recover.train.replay import prepare, refuse_used
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
    assert [len(half) for half in halves] == [300, 300]  # neither half alone tells less


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


def recorded(tmp_path: Path, words: tuple[str, ...] = (), **facts: Any) -> Path:
    """A run that could be replayed, but for `words` and `facts`."""
    keys = dict(
        word.split("=", 1) for word in (*small_world(tmp_path / "world"), "reduction=reproducible", *words)
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
    }
    if facts != {"none": True}:
        note_environment(run_dir, 1, here | facts)
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
        ((), {"update": {"lr": 3e-4, "steps": 7}}, "lr=0.0003, and config.yaml has"),
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
    with pytest.raises(ConfigError, match="not a run of `recover train`"):
        prepare(run_dir, 3)


def test_replay_of_a_run_that_began_elsewhere_needs_a_checkpoint(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    (run_dir / "steps.jsonl").write_text("".join(json.dumps(line(n)) + "\n" for n in range(7, 11)))
    with pytest.raises(ConfigError, match=r"begins with step 7.*copy step-6"):
        prepare(run_dir, 8)


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
