"""Leaving on notice: which replicas leave after a commit, requests by signals and operators, and what is reported."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lone_world
import pytest
import torch
from test_job_state import Signalled
from test_transaction import World, begun, died, like_me
from typer.testing import CliRunner

from recover.cli import app
from recover.job.grid import Grid
from recover.job.leave_request import LeaveRequest, OperatorRequest
from recover.job.spec import EtcdAccess
from recover.launch.hosts import departure as departure_module
from recover.launch.hosts import own_etcd
from recover.launch.hosts.departure import Departure
from recover.launch.hosts.etcd_sync import JobView
from recover.launch.hosts.own_etcd import OwnEtcd
from recover.launch.hosts.placement import Seat
from recover.launch.hosts.slots import HostSlots
from recover.launch.request import LaunchRequest
from recover.launch.verdict import Verdict, write_marker
from recover.runs.live.view import RunView
from recover.runs.records.root_causes import stories
from recover.runs.records.sentences import sentence
from recover.train.last_state import LastState
from recover.train.trainer import Trainer


@pytest.mark.guarantee(
    "Leaving",
    "All replicas know at the commit of a step which replicas leave, also if a rank dies in its vote.",
)
def test_leavers_are_known_after_a_vote_and_after_a_commit_from_the_census() -> None:
    transaction = begun(World(Grid(3, 1), {}), leave_asked=lambda: True, min_replicas=0)
    assert transaction.vote()
    assert transaction.totals.leaving == {0}
    assert transaction.take_leavers() == (0,)
    transaction = begun(World(Grid(3, 1), {1: like_me(1, leaves=True), 2: died}, agreed=[None]))
    assert not transaction.vote()
    assert transaction.recover()
    assert transaction.take_leavers() == (1,)
    assert transaction.take_leavers() == (), "once: a member that begins the step again does not repair alone"


def test_leaver_first_finishes_its_background_calls() -> None:
    transaction = begun(World(Grid(3, 1), {}), is_quiet=lambda: False, leave_asked=lambda: True)
    assert transaction.vote()
    assert transaction.take_leavers() == ()


@pytest.mark.guarantee("Leaving", "If too few replicas would stay, none leaves, and all stop after the step.")
@pytest.mark.parametrize(("least", "stays"), [(1, True), (2, True), (3, False)])
def test_all_stop_if_fewer_than_min_replicas_would_stay(least: int, stays: bool) -> None:
    transaction = begun(World(Grid(3, 1), {}), leave_asked=lambda: True, min_replicas=least)
    assert transaction.vote()
    assert (transaction.take_leavers(), transaction.stop_agreed) == ((0,) if stays else (), not stays)


def test_join_request_waits_while_replicas_leave() -> None:
    """A replica that joined at the same boundary would not know which replicas have left."""
    transaction = begun(World(Grid(3, 1), {}), leave_asked=lambda: True)
    transaction.vote()
    transaction.asked = True
    assert transaction.take_leavers() == (0,)
    assert not transaction.take_join_request()


def test_leavers_are_excluded_by_a_repair_that_repeats_nothing() -> None:
    world = World(Grid(3, 1), {rank: like_me(rank, leaves=rank == 2) for rank in (1, 2)}, agreed=[None])
    transaction = begun(world)
    transaction.vote()
    assert transaction.recover()
    transaction.begin(2, 77)
    incident = transaction.let_leave(transaction.take_leavers())
    assert (world.evicted[-1], world.members) == (frozenset({2}), (0, 1))
    assert (incident.kind, incident.left_ranks, incident.dead_ranks) == ("left", (2,), ())
    assert (incident.extra_microbatches, incident.gone_ranks) == (0, (2,))


class Leaving:
    """A host h2 that can be asked to leave."""

    def __init__(
        self, place: Path, monkeypatch: pytest.MonkeyPatch, grace: float = 600, obstacle: str = ""
    ) -> None:
        self.said, self.stopped = list[str](), 0
        monkeypatch.setattr(departure_module, "say", self.said.append)
        monkeypatch.setattr(departure_module, "_LOOK", 0.0)
        session = place / "session"
        session.mkdir(exist_ok=True)
        self.operator, self.ranks = OperatorRequest(place, "h2"), LeaveRequest(session)
        self.departure = Departure(session, place, "h2", grace, lambda: obstacle)
        self.departure.stop = self._stop

    def _stop(self) -> None:
        self.stopped += 1


@pytest.mark.guarantee(
    "Leaving",
    "A host that is asked twice, or whose step outlasts `--grace`, leaves at once, as if it had died.",
)
def test_second_notice_and_the_end_of_the_grace_period_mean_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Leaving(tmp_path, monkeypatch)
    assert not host.departure.look()
    assert "leaves after its step" in host.departure.notice()
    assert host.departure.look()
    assert (host.ranks.is_asked, host.departure.at_once) == (True, "")
    assert "at once" in host.departure.notice()
    assert host.departure.look()
    assert host.departure.words == "left on notice at once, because it was asked twice"
    late = Leaving(tmp_path, monkeypatch, grace=-1)  # the grace period is over at once
    late.departure.notice()
    assert late.departure.look()
    assert "its step took longer than its grace period" in late.departure.words


@pytest.mark.guarantee(
    "Leaving",
    "Ranks that have agreed to leave or to stop are not ended by `--grace`: the last checkpoint is saved and uploaded.",
)
def test_grace_period_ends_no_ranks_that_have_agreed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds until the ranks take another step, as a script does that does not look at `step.stop_agreed`."""
    host = Leaving(tmp_path, monkeypatch, grace=-1)  # the grace period is over at once
    host.ranks.note_agreement()
    host.departure.notice()
    assert host.departure.look()
    assert host.departure.at_once == ""
    host.ranks.forget_agreement()
    assert host.departure.look()
    assert "its step took longer than its grace period" in host.departure.words


@pytest.mark.parametrize("stops", [True, False])
def test_step_notes_the_agreement_at_its_commit_and_forgets_it_in_the_next(
    tmp_path: Path, stops: bool
) -> None:
    """Tested on a host that is asked to leave and whose replica is the last one, so that all stop; and without a
    request."""
    world = lone_world.World()
    world.job = replace(world.job, session=str(tmp_path))
    step, request = lone_world.begin(world, model := torch.nn.Linear(2, 1)), LeaveRequest(tmp_path)
    if stops:
        request.ask()
    for _ in range(2):
        loop = step.microbatches([torch.ones(1, 2)] * 8)
        for number, batch in enumerate(loop):
            assert not request.is_agreed, f"microbatch {number}"
            step.backward(model(batch).sum())
        assert (step.stop_agreed, request.is_agreed) == (stops, stops)


def test_host_that_cannot_leave_stops_the_job_or_refuses_its_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Leaving(tmp_path, monkeypatch, obstacle="it runs the only etcd")
    host.operator.ask()
    assert not host.departure.look()
    assert (host.operator.answered(), host.stopped) == ("refused: it runs the only etcd", 0)
    host.departure.notice()
    assert not host.departure.look()
    assert not host.departure.look()
    assert (host.stopped, host.ranks.is_asked) == (1, False), "a second stop would end the job at once"
    assert host.departure.notice() == "", "the next signal ends the job"
    host.operator.ask()
    assert not host.departure.look()
    assert host.operator.answered() == "refused: the whole job is asked to stop"


def test_operator_is_answered_by_the_agent_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other = Leaving(tmp_path, monkeypatch), OperatorRequest(tmp_path, "h3")
    other.ask()
    assert not host.departure.look(), "another host was asked"
    host.operator.ask()
    assert host.departure.look()
    assert host.operator.answered() == "leaves"
    host.operator.ask()
    assert host.departure.look()
    assert host.operator.answered() == "leaves", "also if it is asked again meanwhile"
    host.departure.clear_request()
    assert host.operator.is_withdrawn


@pytest.mark.guarantee("Leaving", "`recover leave` says at once if the host has left already.")
def test_operator_is_told_at_once_of_a_host_that_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer stays until an agent of the host is started again. An agent that ends with its job leaves no such
    answer."""
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": {"h1": {}, "h2": {}}}))
    monkeypatch.setattr(
        sys.modules["recover.cli.leave"], "_ANSWER", -1.0
    )  # the command does not wait for an answer
    monkeypatch.setattr(RunView, "job", lambda view: SimpleNamespace(is_over=False))
    host = Leaving(tmp_path, monkeypatch)

    def asked() -> tuple[int, str]:
        told = CliRunner().invoke(app, ["leave", str(tmp_path), "--host", "h2"])
        return told.exit_code, told.output

    host.departure.has_left = True
    host.departure.note_end()
    assert asked() == (0, "host h2 has left the job already\n")
    host.departure.clear_request()  # an agent is started again
    code, told = asked()
    assert (code, "has not answered" in told) == (2, True)
    host.departure.has_left = False
    host.departure.note_end()
    code, told = asked()
    assert (code, "has not answered" in told) == (2, True)


@pytest.mark.guarantee("Leaving", "SIGTERM asks a host to leave; SIGINT and SIGUSR1 stop the whole job.")
def test_sigterm_asks_the_host_to_leave_and_other_signals_stop_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    for number in (signal.SIGINT, signal.SIGUSR1):
        job = Signalled(LaunchRequest(Path("x")), tmp_path, monkeypatch)
        with job.signals as signals, signals.ending(job.end):
            signals.leave = lambda: notices.append("asked") or "leaving"  # type: ignore[func-returns-value]
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (notices, job.ended, signals.asked) == (["asked", "asked"], 0, 0)
            notices.clear()
            os.kill(os.getpid(), number)
            assert (notices, job.ended) == ([], 1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert notices == [], "a job that ends is not left"


@pytest.mark.parametrize(
    ("endpoints", "listening", "needed"),
    [
        (("h1:1",), {}, True),
        (("h1:1", "h2:1", "h3:1"), {"h2", "h3"}, False),
        (("h1:1", "h2:1", "h3:1"), {"h3"}, True),
    ],
)
def test_host_cannot_leave_if_etcd_would_lose_its_majority(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoints: tuple[str, ...],
    listening: set[str],
    needed: bool,
) -> None:
    monkeypatch.setattr(own_etcd, "_listens", lambda host, port: host in listening)
    etcd = OwnEtcd(EtcdAccess(endpoints, "/recover/j/"), tmp_path, alone=False)
    assert etcd.needs_this_host() == "", "it runs no member"
    started: Any = object()
    etcd.server, etcd._endpoint = started, "h1:1"
    monkeypatch.setattr(own_etcd, "client_of", lambda access: Keys({}))
    assert bool(etcd.needs_this_host()) is needed


class Keys:
    """The keys of an etcd, for any number of agents."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self.keys = keys

    def put(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def get_all(self, prefix: str) -> tuple[list[Any], int]:
        return [SimpleNamespace(key=key) for key in self.keys if key.startswith(prefix)], 1

    def delete_all(self, prefix: str) -> None:
        for key in [key for key in self.keys if key.startswith(prefix)]:
            del self.keys[key]


@pytest.mark.parametrize("members", [3, 5])
def test_only_so_many_hosts_leave_at_once_that_etcd_keeps_its_majority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """All hosts are asked before any of their members of etcd has ended."""
    endpoints = tuple(f"h{number}:1" for number in range(members))
    keys: dict[str, bytes] = {}
    monkeypatch.setattr(own_etcd, "_listens", lambda host, port: True)
    monkeypatch.setattr(own_etcd, "client_of", lambda access: Keys(keys))
    leave = []
    for endpoint in endpoints:
        etcd, started = OwnEtcd(EtcdAccess(endpoints, "/recover/j/"), tmp_path, alone=False), object()
        etcd.server, etcd._endpoint = started, endpoint  # type: ignore[assignment]
        if not (why := etcd.needs_this_host()):
            leave.append(endpoint)
        else:
            assert "are needed" in why
    assert len(leave) == members - (members // 2 + 1)
    assert len(keys) == len(leave), "who stays takes its reservation back"


def test_whole_replicas_of_other_hosts_are_counted_without_the_dead() -> None:
    seats = {0: Seat("h1", 0), 1: Seat("h1", 1), 2: Seat("h2", 0), 3: Seat("h3", 0)}
    view = JobView({}, seats, frozenset(seats))
    assert view.has_whole_replica_beside("h2", 2)
    assert view.has_whole_replica_beside("h1", 2), "one that spans two other hosts"
    for lost in ({"dead": frozenset({3})}, {"ends": {3: ""}}):
        view = JobView({}, seats, frozenset(seats), **lost)  # type: ignore[arg-type]
        assert not view.has_whole_replica_beside("h1", 2)


def test_all_hosts_are_noticed_if_those_with_living_ranks_are() -> None:
    seats = {0: Seat("h1", 0), 1: Seat("h2", 0), 2: Seat("h3", 0)}

    def view(*noticed: str, dead: tuple[int, ...] = ()) -> JobView:
        return JobView({}, seats, frozenset(seats), dead=frozenset(dead), noticed=frozenset(noticed))

    assert not view().all_hosts_noticed
    assert not view("h1", "h2").all_hosts_noticed
    assert view("h1", "h2", "h3").all_hosts_noticed
    assert view("h1", "h2", dead=(2,)).all_hosts_noticed


@pytest.mark.parametrize("way", ["saves", "in a commit", "agreed"])
def test_last_state_is_saved_once_while_no_commit_is_under_way(way: str) -> None:
    asked, saved = [False], list[bool]()
    outcomes = iter([False, False, True] if way == "in a commit" else [True])

    def save() -> bool:
        saved.append(next(outcomes))
        return saved[-1]

    state = LastState(lambda: asked[0], lambda: way == "agreed", save)
    assert (state.look(), saved) == (False, [])
    asked[0] = True
    while not state.look():
        pass
    assert saved == {"saves": [True], "in a commit": [False, False, True], "agreed": []}[way]


@pytest.mark.parametrize("when", ["never", "before", "meanwhile"])
def test_state_is_not_saved_while_an_update_is_under_way(when: str) -> None:
    """A commit replaces the result of the last step before it changes anything."""
    step, saved = SimpleNamespace(result="old", index=3), list[Any]()

    def snapshot() -> str:
        step.result = "old" if when == "never" else "new"
        return "copies"

    if when == "before":
        step.result = "new"
    saver = SimpleNamespace(
        newest_on_disk=lambda: 0, save_snapshot=lambda *given: saved.append(given[:2]) or Path("x")
    )
    trainer: Any = SimpleNamespace(
        step=step, _settled="old", saver=saver, _facts=dict, _is_first_here=lambda: True
    )
    trainer.tensors = SimpleNamespace(snapshot=snapshot)
    assert Trainer._save_state_before_step(trainer) is (when == "never")
    assert saved == ([(3, "copies")] if when == "never" else [])


def test_slots_of_a_leaving_host_are_not_free() -> None:
    slots = HostSlots(2, delay=0, forgive=600)
    assert slots.free(1e9) == [0, 1]
    slots.close()
    slots.hold("")  # the files of this host are those of the job
    assert slots.free(1e9) == []


def test_rank_that_left_is_told_apart_from_one_that_was_lost(tmp_path: Path) -> None:
    for rank, (end, detail) in enumerate(
        [("done", ""), ("left", "left on notice after step 3"), ("orphan", "x")]
    ):
        write_marker(tmp_path, rank, {"end": end, "detail": detail})
    verdict = Verdict(tmp_path, 3)
    assert (verdict.done, verdict.left_on_notice, list(verdict.lost)) == ([0], [1], [2])
    start = {"what": "start", "at": 1.0, "ranks": 3}
    words = {"end": "left", "detail": "left on notice after step 3", "at": 2.0}
    left = {"what": "exit", "rank": 1, "at": 2.0, "code": 0, "words": words}
    assert stories([], [start, left]) == []
    incident: Any = {"step": 4, "dead_replicas": [], "left_replicas": [1], "repair_ms": 40.0}
    assert sentence(incident, None, 6) == (
        "step 4: replica 1 left on notice; the others waited 40 ms, nothing to run again"
    )


@pytest.mark.parametrize("shared", [True, False])
def test_host_that_left_at_once_is_named_as_the_cause(shared: bool) -> None:
    """The host's ranks were killed in the midst of a step: they count as lost, by their markers or by the report of
    their agent."""
    why = "left on notice at once, because it was asked twice"
    start = {"what": "start", "at": 1.0, "ranks": 3}
    left = {
        "what": "exit",
        "rank": 1,
        "at": 2.0,
        "signal": "SIGKILL",
        "words": {"end": "left", "detail": why},
    }
    heard = {"what": "heard", "at": 2.0, "host": "h2", "lost_ranks": [1], "why": why}
    incident = {"step": 4, "at": 2.0, "dead_ranks": [1], "dead_replicas": [1]}
    (story,) = stories([incident], [start, left if shared else heard])
    assert [death.cause.kind for death in story.first] == ["notice"]
    assert story.short == "rank 1 left on notice at once"
