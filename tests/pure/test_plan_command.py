"""`recover plan`: its output for people and for programs, and its refusals."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import recover
from recover.cli import app
from recover.policy import DEFAULT_POLICY
from recover.train.config import Config


def plan(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": "160"})


def events(*args: str) -> list[dict[str, Any]]:
    result = plan(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["events"]


JOB = ("--replicas", "32", "--accum", "8", "--policy", "static")  # the paper's job, with roles and spares
BARE = JOB[:4]


def test_plan_json_of_one_loss_is_as_documented() -> None:
    assert json.loads(plan(*JOB, "--lose", "1", "--json").stdout) == {
        "global_batch": 256,
        "events": [
            {
                "lost": ["major"],
                "survivors": 31,
                "boundary": True,
                "promoted": {"major": 0, "minor": 0},
                "extra": {"rounds": 1, "full": 8, "boundary_minors": 23},
                "discarded_microbatches": 0,
                "committed_microbatches": 256,
                "next": {
                    "accum": 9,
                    "major": 28,
                    "minor": 1,
                    "remainder": 4,
                    "major_spare": 1,
                    "minor_spare": 1,
                },
            }
        ],
    }


def test_plan_losses_follow_each_other() -> None:
    _, minor, majors = events(*JOB, "--lose", "1", "--lose", "minor", "--lose", "major,major")
    assert (minor["lost"], minor["survivors"], minor["boundary"]) == (["minor"], 30, False)
    assert minor["promoted"] == {"major": 0, "minor": 1}
    assert minor["extra"] == {"rounds": 0, "full": 0, "boundary_minors": 0}
    assert (majors["lost"], majors["survivors"], majors["boundary"]) == (["major", "major"], 28, True)
    assert majors["promoted"] == {"major": 1, "minor": 0}
    assert majors["extra"] == {"rounds": 1, "full": 9, "boundary_minors": 19}


def test_plan_joins_and_losses_keep_the_given_order() -> None:
    lost, joined, again = events(*JOB, "--lose", "1", "--join", "2", "--lose", "major-spare")
    assert (lost["survivors"], again["survivors"]) == (31, 32)
    # 33 x 8 is more than 256: one replica too many for majors, so it is a spare.
    assert joined == {
        "joined": 2,
        "replicas": 33,
        "committed_microbatches": 256,
        "next": {"accum": 8, "major": 32, "minor": 0, "remainder": 0, "major_spare": 1, "minor_spare": 0},
    }
    assert "no minor is left alive" in plan(*JOB, "--join=2", "--lose", "minor").output
    (first, back) = events("--replicas", "4", "--accum", "3", "--lose=1", "--join=1")
    assert (first["next"]["accum"], back["next"]["accum"]) == (4, 3)
    told = plan("--replicas", "4", "--accum", "3", "--lose", "1", "--join", "1").stdout
    assert "In total: 1 replica lost, 1 joined, 1 extra round" in told


@pytest.mark.parametrize("text", ["0", "-1", "major", "1.5", ""])
def test_plan_join_with_an_invalid_number_is_refused(text: str) -> None:
    result = plan(*JOB, f"--join={text}")
    assert result.exit_code == 2
    assert "is no number of replicas; write one from 1 on" in result.output


def test_plan_loss_in_an_extra_round_cannot_follow_a_join() -> None:
    result = plan(*JOB, "--lose", "1", "--join", "1", "--lose", "major@extra1")
    assert result.exit_code == 2
    assert "comes after a join; put the loss whose extra round it means before it" in result.output


def test_plan_number_of_losses_strikes_at_once_majors_first() -> None:
    (event,) = events("--replicas", "4", "--accum", "3", "--lose", "3")
    assert (event["lost"], event["survivors"]) == (["major"] * 3, 1)
    _, event = events("--replicas", "7", "--accum", "1", "--policy", "static", "--lose", "1", "--lose", "5")
    assert event["lost"] == ["major"] * 3 + ["minor", "major-spare"]
    assert event["committed_microbatches"] == 7


def test_plan_loss_in_an_extra_round_belongs_to_the_same_step() -> None:
    _, inside = events(*JOB, "--lose", "major", "--lose", "major@extra1")
    # 30 survivors, of which 7 hold 9 and 23 hold 8 microbatches: 9 are missing. In a later step, a spare would help.
    assert inside["extra"] == {"rounds": 1, "full": 9, "boundary_minors": 21}
    assert inside["committed_microbatches"] == 256
    _, later = events(*JOB, "--lose", "major", "--lose", "boundary-minor@extra1")
    assert later["lost"] == ["boundary-minor"]
    assert later["extra"] == {"rounds": 1, "full": 8, "boundary_minors": 22}


def test_plan_loss_of_a_role_strikes_the_replica_with_most_in_hand() -> None:
    # At five, 7x2 has four majors at 3 and a minor at 2. When a major dies, the minor and two majors run one
    # more and are its majors, with 3, 4 and 4 in hand. The loss of a 4 leaves 4 to be run by three.
    losses = ("--lose", "2", "--lose", "1", "--lose", "major@extra1")
    event = events("--replicas", "7", "--accum", "2", "--policy", "static", *losses)[-1]
    assert event["extra"] == {"rounds": 2, "full": 1, "boundary_minors": 2}


def test_plan_unused_spare_serves_the_next_loss_of_the_step() -> None:
    losses = (*JOB, "--lose", "11", "--lose", "minor", "--lose", "major@extra1")
    assert events(*losses)[-1]["promoted"] == {"major": 1, "minor": 0}
    assert "0 microbatches of spare work" in plan(*losses).stdout


def test_plan_leaves_out_a_major_spare_that_does_not_fit() -> None:
    event = events(*JOB, "--lose", "11", "--lose", "minor")[-1]
    assert event["promoted"] == {"major": 0, "minor": 0}
    assert event["extra"] == {"rounds": 1, "full": 9, "boundary_minors": 11}
    assert (event["committed_microbatches"], event["discarded_microbatches"]) == (256, 13)


@pytest.mark.parametrize("policy", ["static", "balanced"])
def test_plan_commits_the_batch_for_every_loss_down_to_one_survivor(policy: str, tmp_path: Path) -> None:
    all_events = events(*BARE, "--until", "1", "--policy", policy, "--png", str(tmp_path / "plan.png"))
    assert [event["survivors"] for event in all_events] == list(range(31, 0, -1))
    assert {event["committed_microbatches"] for event in all_events} == {256}


def test_plan_shows_that_the_adaptive_policy_loses_the_batch() -> None:
    first, second = events(*BARE, "--policy", "adaptive", "--lose", "1", "--lose", "3")
    assert (first["committed_microbatches"], second["committed_microbatches"]) == (248, 224)
    assert second["next"]["accum"] == 8


def test_plan_range_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = plan(*JOB, "--until", "1")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan_table_lists_the_losses_and_ends_with_totals() -> None:
    result = plan(*JOB, "--lose", "1", "--lose", "minor")
    assert result.exit_code == 0
    assert "8 run 1 more, 23 boundary-minors run 0" in result.stdout
    assert "1 minor-spare promoted" in result.stdout
    assert "28 major x 9, 1 minor x 4, 1 major-spare, 1 minor-spare" in result.stdout
    # In the second step the spares ran 9 + 4, of which 4 were used.
    assert "2 replicas lost, 1 extra round, 9 microbatches of spare work" in result.stdout


def test_plan_explains_each_of_its_words_on_one_line() -> None:
    """The words of this table, and no others, in a terminal of 80 columns."""
    command = ["plan", *JOB, "--lose", "11", "--lose", "minor", "--lose", "major@extra1"]
    lines = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout.splitlines()
    explained = lines[lines.index("Words:") + 1 :]
    words = [line[2:17].strip() for line in explained]
    table = ["major", "minor", "major-spare", "promoted", "run N more", "boundary-minor", "left out"]
    assert words == ["replica", "microbatch", *table, "extra round", "commits"]
    assert all(line.startswith("  ") and len(line) < 80 and line[17:].strip() for line in explained)
    assert "Words:" not in plan(*JOB, "--lose", "1", "--json").stdout
    few = plan("--replicas", "4", "--accum", "3").stdout
    assert "commits" in few
    assert "spare " not in few.split("Words:")[1]


@pytest.mark.guarantee("Published figures", "`recover plan` shows what the job will do.")
@pytest.mark.parametrize("losses", [[], ["--lose", "1", "--lose", "major"]])
def test_plan_matches_what_the_job_will_do(losses: list[str], tmp_path: Path) -> None:
    """By default the plan uses the trainer's policy; for a job that is given as to `recover train`, it uses the job's
    policy and batch."""
    default = plan(*BARE, *losses, "--json").stdout
    assert default == plan(*BARE, "--policy", Config().policy, *losses, "--json").stdout
    assert default == plan("replicas=32", "accum=8", *losses, "--json").stdout
    static = plan(*JOB, *losses, "--json").stdout
    assert losses == [] or default != static
    config = tmp_path / "job.yaml"
    config.write_text("policy: static\nsamples: partitioned\nreplicas: 32\naccum: 4\n")
    assert plan(str(config), "accum=8", *losses, "--json").stdout == static
    assert plan(str(config), "accum=8", *losses, "--policy", "balanced", "--json").stdout == default
    uneven = plan("replicas=3", "global_batch=10", *losses, "--json")
    assert json.loads(uneven.stdout)["global_batch"] == 10
    assert {event["committed_microbatches"] for event in json.loads(uneven.stdout)["events"]} <= {10}


def test_step_trainer_and_plan_have_one_default() -> None:
    step = inspect.signature(recover.Step.__init__).parameters["policy"].default
    assert step == Config().policy == DEFAULT_POLICY


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["what job?", "recover train"]),
        (["replicas=4", "--accum", "8"], ["--accum", "replicas=8 accum=4"]),
        (["replicas=four"], ["replicas='four'", "whole number"]),
        (["--replicas", "0", "--accum", "8"], ["0 replicas", "at least 1"]),
        (["--replicas", "4", "--accum", "0"], ["accumulation of 0", "at least 1"]),
        ([*JOB, "--lose", "33"], ["'33'", "33 of 32", "31 at most"]),
        ([*JOB, "--lose", "32"], ["'32'", "leave at least one alive"]),
        ([*JOB, "--lose", "chief"], ["'chief'", "major-spare"]),
        ([*JOB, "--lose", "0"], ["'0'", "from 1 on"]),
        ([*JOB, "--lose", "major,"], ["'major,'", "neither a role nor a number"]),
        ([*JOB, "--lose", "minor"], ["no minor is left alive", "32 major"]),
        ([*JOB, "--lose", "major@extra1"], ["'major@extra1' is the first one"]),
        ([*JOB, "--lose", "1", "--lose", "major@extra2"], ["'major@extra2'", "last extra round is extra1"]),
        ([*JOB, "--lose", "1", "--lose", "minor", "--lose", "1@extra1"], ["'1@extra1'", "no extra round"]),
        ([*JOB, "--lose", "1", "--lose", "major@noon"], ["'noon'", "extra1"]),
        ([*JOB, "--lose", "1", "--lose", "1@extra1,1@extra2"], ["two moments"]),
        ([*JOB, "--until", "0"], ["until 0", "1 to 32"]),
        ([*BARE, "--policy", "greedy"], ["'greedy'", "static, balanced, paced or adaptive"]),
        ([*JOB, "--lose", "1", "--png", "/nowhere/plan.png"], ["/nowhere/plan.png"]),
    ],
)
def test_plan_refuses_bad_input_with_one_sentence_and_exit_code_2(args: list[str], words: list[str]) -> None:
    result = plan(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr
