"""Weights, draws and buffers of real runs: those of one process, whichever replica computed what or died."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_numbers import BATCH, STEPS, draws, reference, seed_user
from worlds import Outcome, run_world


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Three replicas, of which one dies in the second run."""
    outcome = run_world("numbers.py", tmp_path_factory.mktemp("plain") / "run", 3, ["plain"])
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [0, 2], outcome.output
    return outcome


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two replicas of two ranks, which compute half of the rows each."""
    outcome = run_world(
        "numbers.py", tmp_path_factory.mktemp("sharded") / "run", 4, ["sharded"], replica_size=2
    )
    assert outcome.code == 0, outcome.output
    return outcome


def only(outcome: Outcome, rank: int, kind: str) -> dict[str, Any]:
    (entry,) = outcome.notes(rank, kind)
    return entry


def check_against_one_process(run: dict[str, Any], shards: int) -> None:
    parameters, buffers = reference(shards)
    for kind, expected in (("parameters", parameters), ("buffers", buffers)):
        assert run[kind].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(run[kind][name], dtype=value.dtype), value, rtol=1e-5, atol=1e-6, msg=name
            )


@pytest.mark.guarantee(
    "The trajectory",
    "Buffers that forward changes are equal on all replicas whichever replica died, and bitwise equal with "
    "`reduction=reproducible`.",
)
def test_buffers_and_draws_match_one_process_through_a_death(plain: Outcome) -> None:
    calm = only(plain, 0, "calm")
    check_against_one_process(calm, shards=1)
    assert calm["buffers"]["norm.num_batches_tracked"] == BATCH * STEPS
    for rank in plain.survivors:
        for run in (
            "calm",
            "torn",
            "again",
            "after-leaving",
        ):  # three replicas, then two; a step that was left
            found = only(plain, rank, run)
            assert {**found, "kind": ""} == {**calm, "kind": ""}, f"rank {rank}, {run}"


@pytest.mark.guarantee(
    "The trajectory",
    "Random draws of a microbatch slot depend neither on the replica nor on the round, and the ranks of a "
    "replica draw separately.",
)
def test_replica_peers_draw_separately_and_agree_on_buffers(sharded: Outcome) -> None:
    """The reference draws for each rank's rows apart, and reads every sample once for both."""
    for rank in range(4):
        check_against_one_process(only(sharded, rank, "calm"), shards=2)
        for facts in ("buffers", "losses", "own"):
            assert only(sharded, rank, "calm")[facts] == only(sharded, 0, "calm")[facts]


def test_own_ddp_model_keeps_buffers_equal(plain: Outcome) -> None:
    first, second = (only(plain, rank, "ddp") for rank in plain.survivors)
    assert first["buffers"] == second["buffers"]
    check_against_one_process(first, shards=1)


@pytest.mark.guarantee(
    "The trajectory",
    "The user's own generators advance as if there were no step, through deaths and abandoned steps.",
)
def test_user_generators_advance_as_if_there_were_no_step(plain: Outcome) -> None:
    seed_user()
    expected = [draws() for _ in range(STEPS + 1)]
    for rank in plain.survivors:
        for run in ("calm", "torn", "after-leaving"):
            assert only(plain, rank, run)["own"] == expected
        assert only(plain, rank, "left")["own"] == expected[:2]


def test_step_left_early_restores_buffers(plain: Outcome) -> None:
    assert all(only(plain, rank, "left")["same"] for rank in plain.survivors)


@pytest.mark.guarantee(
    "The trainer", "A resume with another number of replicas or another B repeats and skips no sample."
)
def test_changed_batch_is_refused_or_continues_with_the_next_sample(plain: Outcome) -> None:
    for rank in plain.survivors:
        (refusal,) = (entry for entry in plain.notes(rank, "refused") if entry["what"] == "batch")
        assert "global_batch=6" in refusal["text"]
        assert "global_batch=4" in refusal["text"]
        assert "rebatch=True" in refusal["text"]
        went_on = only(plain, rank, "rebatched")
        assert went_on["index"] == STEPS + 1
        assert went_on["samples"] == [18, 19, 20, 21]
        assert went_on["state"]["samples"] == {"mode": "exact", "next": 22}


@pytest.mark.guarantee("The trajectory", "A buffer that changes unannounced is refused by name.")
def test_unannounced_buffer_change_is_refused_by_name(plain: Outcome) -> None:
    for rank in plain.survivors:
        (refusal,) = (entry for entry in plain.notes(rank, "refused") if entry["what"] == "buffer")
        assert "'seen' was changed" in refusal["text"]
        assert "buffers=['seen']" in refusal["text"]
