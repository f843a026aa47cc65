"""First causes: an orphan is never the cause, and evidence counts more than conclusions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import START, exit_line, incident_line, make_run, start_line, write_lines
from typer.testing import CliRunner

from recover.cli import app
from recover.runs.records.root_causes import stories
from recover.world.liveness.board import Board
from recover.world.liveness.host_faults import HostFaults

RAISED = {"end": "raised", "kind": "ValueError", "detail": "ValueError: no", "place": "script.py:3, in main"}
CUDA = RAISED | {"kind": "AcceleratorError", "detail": "AcceleratorError: CUDA error: unspecified"}
XID_43 = (
    "NVRM: Xid (PCI:0000:00:06): 43, pid=4242, name=python3, channel 0x0000000a"  # a line of an H200's driver
)
ENDS: list[dict[str, Any]] = [
    {"signal": "SIGKILL"},
    {"signal": "SIGSEGV", "crash": "Fatal Python error: Segmentation fault"},
    {"code": 3},
    {},
    {"words": RAISED},
    {"words": {"end": "fenced", "detail": "its process has been stopped for 2 s"}},
    {"words": {"end": "excluded", "detail": "was excluded by the others"}},
    {"oom_kills": 1, "signal": "SIGKILL"},
    {"words": RAISED, "note": {"step": 5, "suspects": [[3, 43]], "why": "it raised"}},
    {"words": RAISED | {"kind": "PoisonedSampleError"}},
]
GLOO = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.2]:17604: Connection timed out. This is"
ORPHAN = {"words": {"end": "orphan", "detail": "rank 0 of this replica has died"}, "signal": "SIGKILL"}


@pytest.mark.guarantee("Monitoring", "An orphan is never named as the cause.")
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_orphan_is_never_the_cause_and_each_loss_is_reported_once(
    data: st.DataObject, size: int, replicas: int
) -> None:
    """Each replica has at most one first cause: a rank that was no orphan, and before which no other rank of the
    replica died."""
    ranks = size * replicas
    exits = []
    for rank in range(ranks):
        what = data.draw(st.sampled_from([*ENDS, ORPHAN, ORPHAN]))
        exits.append(exit_line(rank, START + data.draw(st.integers(0, 5)), **what))
    seen = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    dead = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    job = [start_line(ranks, replica_size=size), *(exits[rank] for rank in seen)]
    incident = incident_line(5, sorted(dead), at=START + 6)
    story, *rest = stories([incident], job)
    assert sorted(death.rank for death in story.deaths) == sorted(dead)
    orphans = {rank for rank in seen if exits[rank].get("words", {}).get("end") == "orphan"}
    firsts = [death.rank for death in story.first]
    assert not orphans & set(firsts)
    assert len({rank // size for rank in firsts}) == len(firsts)
    agreed = {rank for rank in seen if exits[rank].get("words", {}).get("kind") == "PoisonedSampleError"}
    blamed = {rank // size for rank in dead - orphans} - {rank // size for rank in agreed & dead}
    assert blamed <= {rank // size for rank in firsts}, "the one that matters is missing"
    times = [exits[rank]["at"] for rank in firsts if rank in seen]
    assert times == sorted(times)
    for first in set(firsts) & seen:
        peers = {rank for rank in dead & seen if rank // size == first // size} - orphans
        assert exits[first]["at"] == min(exits[rank]["at"] for rank in peers)
    for other in rest:
        assert other.incident is None
        assert not {death.rank for death in other.deaths} & dead, "told twice"


@pytest.mark.guarantee(
    "Several hosts",
    "`recover why` names a lost host as the first cause with time and advice, and lists its ranks.",
)
@pytest.mark.parametrize("shared", [False, True], ids=["each host its own directory", "a shared one"])
def test_lost_host_is_the_first_cause_and_lists_its_ranks(shared: bool) -> None:
    """Replicas have two ranks. h1 with ranks 0 to 2 loses its power, so rank 3 on h2 is an orphan; rank 5 was killed
    on h3."""
    heard = {
        "what": "heard",
        "host": "h1",
        "lost_ranks": [0, 1, 2],
        "why": "host h1 has lost its lease",
        "lease": 2.0,
    }
    killed = {"what": "heard", "host": "h3", "lost_ranks": [5], "why": "its process was ended by SIGKILL"}
    job = [
        start_line(6, replica_size=2),
        killed | {"at": START + 5},
        heard | {"at": START + 7},
        exit_line(3, START + 7.1, **ORPHAN),
    ]
    if (
        shared
    ):  # the agents of all hosts write there; h1 was cut off, and its ranks ended later, in another order
        fenced = {
            "words": {"end": "fenced", "detail": "rank 0 was declared dead: host h1 has lost its lease"}
        }
        job += [exit_line(rank, START + 20 - rank, **fenced) for rank in (0, 1, 2)]
        job += [killed | {"at": START + 5.1}, heard | {"at": START + 7.2}]
    story, *rest = stories([incident_line(5, [0, 1, 2, 3, 5], at=START + 8)], job)
    assert rest == []
    first, second = story.first
    assert (first.rank, first.cause.kind, first.at) == (5, "elsewhere", START + 5)
    assert "host h3, whose agent said: its process was ended by SIGKILL" in first.cause.text
    assert (second.rank, second.cause.kind, second.at) == (0, "host", START + 7)
    assert "host h1 was lost, with ranks 0, 1, 2: there was no sign of it" in second.cause.text
    assert "2 s" in second.cause.text
    assert "look at h1" in second.cause.advice
    followed = {
        death.rank: (death.because_of, death.cause.kind) for death in story.deaths if death not in story.first
    }
    assert followed == {1: (0, "host"), 2: (0, "host"), 3: (2, "orphan")}


@pytest.mark.parametrize(
    ("seen", "kind", "said"),
    [
        ({"signal": "SIGKILL"}, "killed", "somebody outside of the job sent it SIGKILL"),
        ({"signal": "SIGKILL", "oom_kills": 2}, "oom", "counts an OOM kill"),
        (
            {"kernel": ["Memory cgroup out of memory: Killed process 4242 (python)"]},
            "oom",
            "Killed process 4242",
        ),
        ({"words": RAISED}, "raised", "ValueError: no, at script.py:3"),
        ({"words": RAISED | {"detail": GLOO}}, "link", "a rank of its own replica, at 10.77.0.2, was lost"),
        ({"words": CUDA, "gpu": ["GPU 3: Xid 79"]}, "gpu", "the GPU has fallen off the bus"),
        ({"signal": "SIGKILL", "gpu": ["GPU 3: Xid 79"]}, "killed", "sent it SIGKILL"),
        ({"words": CUDA, "gpu": ["GPU 0: Xid 31"]}, "gpu-program", "memory that is not its own"),
        ({"words": CUDA, "kernel": [XID_43]}, "gpu-program", "a kernel was stopped"),
        ({"words": RAISED, "kernel": ["NVRM: Xid (PCI:0000:1b:00): 48, pid=7"]}, "raised", "ValueError"),
        (
            {"words": RAISED, "kernel": ["NVRM: Xid (PCI:0000:1b:00): 48, pid=4242"]},
            "gpu",
            "an ECC error of two bits",
        ),
        ({"signal": "SIGBUS", "kernel": ["mce: [Hardware Error]: CPU 3"]}, "hardware", "Hardware Error"),
        ({"words": RAISED | {"detail": "OSError: [Errno 28] No space left"}}, "disk-full", "No space left"),
        (
            {"words": {"end": "fenced", "detail": "it runs, but has done nothing for 60 s"}},
            "hung",
            "done nothing",
        ),
        ({"signal": "SIGABRT"}, "crashed", "left no stack"),
        ({"code": 9}, "left", "exit code 9"),
        ({}, "unknown", "no last words, no crash, no exit status"),
    ],
)
def test_proven_cause_comes_before_the_ranks_own_report(seen: dict[str, Any], kind: str, said: str) -> None:
    (story,) = stories([incident_line(5, [1])], [start_line(2), exit_line(1, START + 6, **seen)])
    (death,) = story.first
    assert death.cause.kind == kind
    assert said in death.cause.text
    assert death.cause.advice


def test_scheduled_fault_is_distinguished_from_an_earlier_cause() -> None:
    job = [start_line(3, faults=["5:1.0:in-reduce", "9:2.0:vote"])]
    job += [
        exit_line(1, START + 6, step=5, signal="SIGKILL"),
        exit_line(2, START + 6, step=5, signal="SIGKILL"),
    ]
    (story,) = stories([incident_line(5, [1, 2])], job)
    assert [death.cause.kind for death in story.first] == ["scheduled", "killed"]


def test_causes_of_an_earlier_launch_are_not_repeated(tmp_path: Path) -> None:
    """The same rank died in both launches, of different causes; and a rank that is ended with the job is no loss."""
    job = [start_line(2), exit_line(1, START + 7, signal="SIGKILL"), {"what": "end", "at": START + 30}]
    job += [start_line(2, at=START + 100), exit_line(1, START + 107, code=3)]
    job += [{"what": "ending", "at": START + 110, "reason": ""}, exit_line(0, START + 111, signal="SIGKILL")]
    losses = [incident_line(5, [1]), incident_line(60, [1], epoch=2, at=START + 108)]
    told = stories(losses, job)
    assert [story.first[0].cause.kind for story in told] == ["killed", "left"]


def test_rank_that_reported_a_cause_before_the_end_is_listed_as_lost() -> None:
    """A process with a GPU takes seconds to exit. A rank that reports an error because it is ended is no loss."""

    def raised(rank: int, said: float) -> dict[str, Any]:
        words = {"end": "raised", "kind": "ValueError", "at": said}
        return exit_line(rank, START + 14, signal="SIGKILL", words=words)

    job = [start_line(3), raised(0, START + 11), {"what": "ending", "at": START + 12, "reason": ""}]
    job += [raised(1, START + 11.5), raised(2, START + 13)]
    (story,) = stories([], job)
    assert [death.rank for death in story.deaths] == [0, 1]


def test_board_shows_the_activity_of_a_rank_during_a_step(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 2)

    def doing() -> tuple[str, int, tuple[int, ...]]:
        now = board.now(1)
        assert 0 <= now.seconds < 60
        return now.doing, now.step, now.slots

    board.claim(1)
    assert doing() == ("starting", 0, ())
    board.join(1)
    assert doing() == ("warming up", 0, ())
    board.enter(1, 1)
    board.finish(1, 1)
    assert doing() == ("warming up", 0, ()), "an agreement outside of a step is no vote"
    board.in_step(1, 7)
    assert doing() == ("preparing", 7, ())
    board.compute(1, [(3, 43), (4, 44)])
    assert doing() == ("computing", 7, (3, 4))
    board.compute(1, ())
    board.come_to_vote(1)
    assert doing() == ("reducing", 7, ())
    board.enter(1, 2)
    assert doing() == ("voting", 7, ())
    board.repair(1)
    board.enter(1, 3)
    board.finish(1, 3)
    assert doing() == ("repairing", 7, ()), "the agreements of a repair are no votes"
    board.compute(1, [(5, 45)])
    board.come_to_vote(1)
    board.enter(1, 4)
    board.finish(1, 4)
    assert doing() == ("updating", 7, ())
    board.in_step(1, 0)
    assert doing() == ("between steps", 0, ())
    assert board.state(1) == "R"
    assert board.state(0) == ""


def test_status_prints_the_same_as_text_and_json_for_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["status"]).exit_code == 2
    make_run(tmp_path / "runs" / "first")
    told = CliRunner().invoke(app, ["status"])
    assert told.exit_code == 0, told.output
    for words in (
        "first: running",
        "20 of 40",
        "16 of B = 16",
        "3 of 4",
        "1. step 5: lost replica 1; rank 1 killed by SIGKILL",
    ):
        assert words in told.output
    found = json.loads(CliRunner().invoke(app, ["status", "runs/first", "--json"]).output)
    assert f"{found['goodput']['goodput']:.2%}" in told.output
    assert found["losses"][0]["cause"] == "rank 1 killed by SIGKILL"
    write_lines(tmp_path / "runs" / "first" / "job.jsonl", [start_line(4), {"what": "end", "at": START + 9}])
    followed = CliRunner().invoke(app, ["status", "--follow"])  # until the run has ended
    assert "first: ended" in followed.output


def test_kernel_messages_are_found_by_pid_and_keep_no_resources() -> None:
    """A launcher examines each death, for weeks, so it may keep no memory of any."""
    troubles = HostFaults()
    said = [f"Out of memory: Killed process {pid} (python3)" for pid in (42, 420, 1042)]
    troubles._kernel.said.extend((0.0, line) for line in [*said, XID_43, "traps: x42[7] ip:42a"])
    assert troubles.look(42)[0] == said[:1]
    assert troubles.look(4242)[0] == [XID_43]
    troubles._kernel.said.append((0.0, "Out of memory: Killed process 77 (python3) UID:0 oom_score_adj:0"))
    assert troubles.look(0)[0] == [], "one that nobody has seen is not that of root"
    patterns = len(re._cache)  # type: ignore[attr-defined]
    for pid in range(10_000, 10_100):
        troubles.look(pid)
    assert len(re._cache) == patterns  # type: ignore[attr-defined]
