"""Supervisors of ranks survive exceptions, or end their host in a way that the other hosts see."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover.job.host_options import HostOptions
from recover.job.spec import EtcdAccess, JobSpec
from recover.job.supervised import Supervised, SupervisorError
from recover.launch import supervisor as supervisor_module
from recover.launch.announcements import Announcer
from recover.launch.hosts import agent as agents
from recover.launch.hosts import host_ranks as host_ranks_module
from recover.launch.hosts.agent import HostAgent
from recover.launch.hosts.coordination import HostCoordination
from recover.launch.hosts.departure import Departure
from recover.launch.hosts.etcd_sync import EtcdSync
from recover.launch.hosts.host_ranks import HostRanks
from recover.launch.hosts.options import HostPart
from recover.launch.hosts.placement import Seat
from recover.launch.hosts.rendezvous import HostPlan
from recover.launch.hosts.replica_restarts import RestartedReplica
from recover.launch.hosts.slots import SETTLE, HostSlots
from recover.launch.output_relay import Relay
from recover.launch.request import LaunchRequest
from recover.launch.signals import JobSignals
from recover.launch.supervisor import Lifecycle, State, Supervisor
from recover.launch.verdict import write_marker
from recover.launch.witness import Witness
from recover.runs.records.job_log import job_lines
from recover.world.fabrics.etcd.client import Answer, EtcdError
from recover.world.liveness.exiting import ExitingRanks

GENEROUS = 30.0


def test_supervised_part_that_raises_does_not_block_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    supervised, done = Supervised("the agent", patience=0.0), []
    for _ in range(3):
        with supervised.part("tell"):
            raise KeyError("x")
        with supervised.part("look"):
            done.append(1)
    assert done == [1] * 3
    said = capsys.readouterr().err
    assert said.count("the agent could not tell: KeyError: 'x'; it goes on") == 1


def test_required_part_that_keeps_failing_ends_its_host() -> None:
    supervised = Supervised("the agent", patience=0.0)
    with supervised.part("look", essential=True):
        raise OSError(errno.EIO, "x")
    with supervised.part("look", essential=True):
        pass  # the part has recovered: its patience counts from the next failure
    with supervised.part("look", essential=True):
        raise OSError(errno.EIO, "x")
    time.sleep(0.001)
    with pytest.raises(SupervisorError, match="could not look: OSError"), supervised.part("look", True):
        raise OSError(errno.EIO, "x")


class Etcd:
    """A fake etcd that keeps declared deaths, and fails if the test says so."""

    def __init__(self) -> None:
        self.declared: list[str] = []
        self.fails: Exception | None = None

    def txn(self, compare: Any, then: Any, otherwise: Any = ()) -> Answer:
        if self.fails:
            raise self.fails
        self.declared += [guard["key"] for guard in compare if guard["key"].startswith("seen/dead/")]
        return Answer(True, 1, ((),) * 5)

    def read(self, *reads: Any) -> Answer:
        if self.fails:
            raise self.fails
        return Answer(False, 1, ((),) * 5)

    def grant(self, ttl: float) -> tuple[int, int]:
        return 1, 1


def a_sync(etcd: Etcd, look: Any = lambda: None, late: bool = False) -> EtcdSync:
    plan = HostPlan("run", "", {"h1": {"id": "i", "address": "a"}}, (Seat("h1", 0), Seat("h1", 1)))
    me = SimpleNamespace(host="h1", id="i")
    meeting: Any = SimpleNamespace(me=me, present=lambda plan: (plan, {"h1"}), late=late)
    return EtcdSync(etcd, meeting, plan, [], look, lambda ranks: True, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.guarantee(
    "The launcher",
    "A supervisor survives exceptions; one that cannot work ends its host and declares its ranks dead or "
    "lets its lease expire.",
)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyError("x"), MemoryError()])
def test_agent_declares_deaths_although_the_hang_check_fails(error: Exception) -> None:
    """The thread of EtcdSync is the only one that reports deaths of this host to the others."""
    looked = threading.Semaphore(0)

    def look() -> None:
        looked.release()
        raise error

    etcd = Etcd()
    sync = a_sync(etcd, look)
    sync.start()
    for _ in range(3):
        assert looked.acquire(timeout=GENEROUS), "the thread has ended"
    sync.report_end(1, None, "killed")
    deadline = time.monotonic() + GENEROUS
    while not etcd.declared:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert etcd.declared[0].endswith("1")
    assert sync.view.failure is None
    assert sync.view.silent_since is None
    sync.stop()


def test_agent_that_cannot_report_deaths_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = Etcd()
    etcd.fails = ValueError("no such thing")
    sync = a_sync(etcd)
    monkeypatch.setattr(
        "recover.launch.hosts.etcd_sync.Supervised", lambda name: Supervised(name, patience=0.0)
    )
    sync.start()
    deadline = time.monotonic() + GENEROUS
    while sync.view.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nothing: Any = None
    coordination = HostCoordination(sync, nothing, nothing, nothing, 0.0, 0.0, threading.Event(), nothing)
    with pytest.raises(SupervisorError):
        coordination.must_end()
    assert not sync.declare_all("its agent has failed", GENEROUS), "nobody is left to say it"


def test_agent_whose_sync_thread_cannot_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ends silently would leave the deaths of this host undeclared."""
    monkeypatch.setattr(EtcdSync, "_pause", lambda self: 1 / 0)
    sync = a_sync(Etcd())
    sync.start()
    deadline = time.monotonic() + GENEROUS
    while sync.view.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "ZeroDivisionError" in str(sync.view.failure)


@pytest.mark.parametrize(("timeout", "has_ended"), [(0.0, False), (1.0, True)])
def test_computing_ranks_get_their_timeout_when_etcd_is_lost(
    tmp_path: Path, timeout: float, has_ended: bool
) -> None:
    """A timeout of 0 means never."""
    ranks: Any = SimpleNamespace(is_computing=lambda: True, running={0})
    spec: Any = SimpleNamespace(session=str(tmp_path), across=False)
    coordination = HostCoordination.__new__(HostCoordination)
    coordination._timeout, coordination._ranks, coordination._spec = timeout, ranks, spec
    assert coordination._have_ended_without_etcd(time.monotonic() - 100.0) is has_ended


def test_remaining_ranks_are_declared_dead_unless_etcd_is_silent() -> None:
    etcd = Etcd()
    sync = a_sync(etcd)
    sync.start()
    sync.report_end(0, None, "")
    assert sync.declare_all("its agent has failed", GENEROUS)
    assert [key[-1] for key in etcd.declared] == ["1"]
    sync.stop()
    etcd.fails = EtcdError("silent")
    sync = a_sync(etcd)
    sync.start()
    assert not sync.declare_all("its agent has failed", 0.1)
    sync.stop()


def test_view_knows_a_restarted_replica_before_it_is_handed_over() -> None:
    """The supervisor ends joining ranks that its view does not know, and a view is immutable."""
    sync, replica = a_sync(Etcd()), RestartedReplica((2,), (Seat("h2", 0),))
    restarts: Any = SimpleNamespace(known={}, asked=set())
    sync.restarts, before = restarts, sync.view
    sync.add_restarted(replica)
    assert sync.next_restarted() is None
    restarts.known[2] = replica
    sync._publish()
    assert sync.next_restarted() is replica
    assert sync.next_restarted() is None
    assert (sync.view.restarted, sync.view.seats[2]) == ({2}, Seat("h2", 0))
    assert (before.restarted, sorted(before.seats)) == (frozenset(), [0, 1])


class Process:
    """A rank as its agent sees it."""

    def __init__(self) -> None:
        self.pid, self.code = os.getpid(), None
        self.stdout = self.stderr = None
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed, self.code = True, -9  # type: ignore[assignment]

    def wait(self) -> None:
        pass


class Hosts:
    """The interface to the other hosts; a test says when the job must end."""

    must_end: Any = staticmethod(lambda: False)

    def start(self) -> None:
        pass

    def ends(self) -> dict[int, str]:
        return {}


@pytest.fixture
def host_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks 0 and 1 of this host, without processes, and the ends of ranks that were reported to their agent."""
    (tmp_path / "session").mkdir()
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    started: list[Process] = []

    def start(*_: Any) -> Process:
        started.append(Process())
        return started[-1]

    monkeypatch.setattr(host_ranks_module, "start", start)
    spec = JobSpec(2, run_dir=str(tmp_path / "run"), session=str(tmp_path / "session"), host="h1", room=10)
    session: Any = SimpleNamespace(directory=tmp_path / "session", scratch=tmp_path)
    ends: list[tuple[int, str | None, str]] = []
    slots = HostSlots(3, 0.0, 600.0)
    tell: Any = lambda *end: ends.append(end)  # noqa: E731
    ranks = HostRanks(spec, {0: 0, 1: 1}, slots, 3, session, ["x"], tell)
    witness: Any = SimpleNamespace(begin=lambda spec: None, watch=lambda board: None)
    hosts = Hosts()
    supervisor = Supervisor(spec, ranks, session, witness, [], hosts)
    supervisor.start()
    return SimpleNamespace(
        ranks=ranks, started=started, ends=ends, slots=slots, dir=tmp_path, supervisor=supervisor, hosts=hosts
    )


@pytest.mark.guarantee(
    "The launcher",
    "A supervisor survives exceptions; one that cannot work ends its host and declares its ranks dead or "
    "lets its lease expire.",
)
@pytest.mark.parametrize("where", ["reap", "take_over", "verdict", "_tell"])
def test_agent_continues_after_an_exception_in_any_part_of_its_loop(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(supervisor_module, "_LOOK", 0.0)
    monkeypatch.setattr(HostRanks, "tick", 0.001)
    owner = HostRanks if where == "reap" else Supervisor
    real, raised = getattr(owner, where), []

    def fail(self: Any, *arguments: Any) -> Any:
        if len(raised) < 3:
            raised.append(1)
            raise OSError(errno.EIO, "Input/output error")
        return real(self, *arguments)

    monkeypatch.setattr(owner, where, fail)
    host_ranks.started[1].code = -9
    passes: list[int] = []

    def must_end() -> bool:
        passes.append(1)
        return len(raised) == 3 and bool(host_ranks.ends) and len(passes) > 20

    host_ranks.hosts.must_end = must_end
    assert host_ranks.supervisor.watch(0.0) == ""
    assert host_ranks.ends == [(1, "", "its process was ended by SIGKILL")]
    assert host_ranks.ranks.running == {0}


@pytest.mark.guarantee(
    "Several hosts", "An agent declares a rank dead before the kernel has freed the memory of its process."
)
def test_agent_declares_an_exiting_rank_and_keeps_its_slot(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is free when the process is gone: it still holds memory, and perhaps a GPU."""
    ranks, found = host_ranks.ranks, [1]
    monkeypatch.setattr(ExitingRanks, "look", lambda self, now: [found.pop()] if found else [])
    monkeypatch.setattr(host_ranks_module, "exit_code", lambda pid: -9)
    declared = [(1, "", "its process was ended by SIGKILL")]
    for _ in range(2):
        ranks.reap()
        assert host_ranks.ends == declared
        assert ranks.running == {0, 1}
        assert host_ranks.slots.free(time.monotonic() + SETTLE) == [2]
    host_ranks.started[1].code = -9
    ranks.reap()
    assert host_ranks.ends == declared
    assert ranks.running == {0}
    assert host_ranks.slots.free(time.monotonic() + SETTLE) == [1, 2]


def test_agent_declares_no_rank_dead_that_is_finishing(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is exiting with 0."""
    monkeypatch.setattr(ExitingRanks, "look", lambda self, now: [1])
    monkeypatch.setattr(host_ranks_module, "exit_code", lambda pid: 0)
    host_ranks.ranks.reap()
    assert host_ranks.ends == []


def test_end_whose_report_fails_is_reported_again(host_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, found = [RuntimeError("no memory")], [1]

    def tell(*end: Any) -> None:
        if failures:
            raise failures.pop()
        host_ranks.ends.append(end)

    monkeypatch.setattr(host_ranks.ranks, "_report_end", tell)
    monkeypatch.setattr(ExitingRanks, "look", lambda self, now: [found.pop()] if found else [])
    monkeypatch.setattr(host_ranks_module, "exit_code", lambda pid: -40)
    with pytest.raises(RuntimeError, match="no memory"):
        host_ranks.ranks.reap()
    host_ranks.started[1].code = -40
    host_ranks.ranks.reap()
    assert host_ranks.ends == [(1, "", "its process was ended by signal 40")]


@pytest.mark.parametrize("outside", [True, False])
def test_marker_of_a_declared_rank_is_kept(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    """Its process is exiting for long: the agent must not take it for a rank that runs."""
    ranks, found = host_ranks.ranks, [1]
    if outside:
        ranks.outside.add(1)
        ranks._began[1] = 0.0
    monkeypatch.setattr(ExitingRanks, "look", lambda self, now: [found.pop()] if found else [])
    monkeypatch.setattr(host_ranks_module, "exit_code", lambda pid: -9)
    ranks.reap()
    ranks.dismiss([1], "it can never be whole")
    ranks.end_ranks_not_ready([], 0.0)
    ranks.leave_at_once("its host leaves")
    markers = [path.name for path in (host_ranks.dir / "run" / "ranks").iterdir()]
    assert "1.end" not in markers
    assert not host_ranks.started[1].killed


@pytest.mark.guarantee(
    "Leaving",
    "An agent says that its host has left as asked only if its ranks have left, and none was lost meanwhile.",
)
@pytest.mark.parametrize(
    ("code", "marker", "before", "why"),
    [
        (0, "left", False, ""),
        (-15, None, False, "rank 0: its process was ended by SIGTERM"),
        (1, "raised", False, "rank 0: its process ended with 1"),
        (-15, None, True, ""),  # rank 0 was lost before
    ],
)
def test_host_has_left_as_asked_only_if_its_ranks_have(
    host_ranks: Any, code: int, marker: str | None, before: bool, why: str
) -> None:
    """Rank 1 leaves. Rank 0 leaves, too, or is ended by the script's handler for SIGTERM, or raises."""
    ranks, departure = host_ranks.ranks, Departure(host_ranks.dir, host_ranks.dir, "h1", 600, lambda: "")
    view: Any = SimpleNamespace(asked=frozenset())
    parts: list[Any] = [SimpleNamespace(view=view), ranks, None, None, 0.0, 0.0, threading.Event(), departure]
    coordination = HostCoordination(*parts)

    def end(rank: int, code: int, words: str | None) -> None:
        if words:
            write_marker(host_ranks.dir / "run", rank, {"end": words, "detail": ""})
        host_ranks.started[rank].code = code
        ranks.reap()

    if before:
        end(0, code, marker)
    assert not coordination._has_left()
    if not before:
        end(0, code, marker)
    assert not coordination._has_left()
    end(1, 0, "left")
    assert coordination._has_left()
    assert departure.at_once == (f"ranks ended before they could leave ({why})" if why else "")


@pytest.mark.parametrize("late", [False, True])
def test_host_that_comes_back_declares_only_ranks_that_it_started(late: bool) -> None:
    """The host's first ranks were lost with the previous agent: the agent must not declare that they left on
    notice."""
    etcd = Etcd()
    sync = a_sync(etcd, late=late)
    sync.start()
    assert sync.declare_all("left on notice", GENEROUS, "{}")
    sync.stop()
    assert len(etcd.declared) == (0 if late else 2)


def test_rank_that_finishes_during_a_poll_is_not_reported_as_lost(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank leaves its marker, then its process ends, possibly between the two reads of one poll."""
    marker, reads = host_ranks.dir / "run" / "ranks" / "0.end", []
    verdict, supervisor = Supervisor.verdict, host_ranks.supervisor
    supervisor._announcer = Announcer(host_ranks.dir / "run")

    def read(what: str) -> bool:
        """Whether the process of rank 0 lives; it ends after the first read of the second poll."""
        reads.append(what)
        if len(reads) == 4:
            marker.write_text('{"end": "done", "detail": ""}')
        return len(reads) < 4

    monkeypatch.setattr(Supervisor, "verdict", lambda self: (read("markers"), verdict(self))[1])
    monkeypatch.setattr(HostRanks, "pids", lambda self: {0: int(read("pids"))})
    supervised = Supervised("the agent")
    for _ in range(3):
        assert supervisor._look(supervised, time.monotonic(), False) is None
    assert reads == ["pids", "markers"] * 3
    assert "lost" not in capsys.readouterr().err


def test_agent_that_cannot_supervise_its_ranks_reports_it(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "Supervised", lambda name: Supervised(name, patience=0.0))
    monkeypatch.setattr(HostRanks, "reap", lambda self: 1 / 0)
    monkeypatch.setattr(HostRanks, "tick", 0.001)
    passes = iter(range(1000))
    host_ranks.hosts.must_end = lambda: next(passes, None) is None
    with pytest.raises(SupervisorError, match="look after its ranks"):
        host_ranks.supervisor.watch(0.0)


@pytest.mark.parametrize(("number", "ends"), [(errno.EPIPE, True), (errno.EIO, False)])
def test_job_ends_with_the_reader_of_its_output_and_with_no_other_failure(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch, number: int, ends: bool
) -> None:
    """An example is `recover run ... | head`, on every fabric."""

    def fail(self: Relay, timeout: float) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Relay, "pump", fail)
    passes = iter(range(5))
    host_ranks.hosts.must_end = lambda: next(passes, None) is None
    failure = host_ranks.supervisor.watch(0.0)
    assert failure == ("its output has no reader any more (Broken pipe)" if ends else "")


def test_agent_declares_a_death_although_its_log_output_fails(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(HostSlots, "leave", fail)
    host_ranks.started[0].code = 1
    with pytest.raises(OSError, match="Broken pipe"):
        host_ranks.ranks.reap()
    assert host_ranks.ends == [(0, "", "its process ended with 1")]
    host_ranks.ranks.reap()
    assert len(host_ranks.ends) == 1, "it is told once"


@pytest.mark.parametrize("what", ["the file of the job", "the process", "its output"])
def test_rank_that_cannot_be_started_is_declared_dead(
    host_ranks: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        *{
            "the file of the job": (JobSpec, "write"),
            "the process": (host_ranks_module, "start"),
            "its output": (Relay, "add"),
        }[what],
        fail,
    )
    replica = RestartedReplica((2,), (Seat("h1", 2),))
    host_ranks.ranks.start_joining_ranks(replica, False)
    if what == "its output":
        assert host_ranks.started[-1].killed
        host_ranks.ranks.reap()
    ((rank, marker, death),) = host_ranks.ends
    assert (rank, marker) == (2, None)
    assert "No space left" in death or "SIGKILL" in death
    assert not host_ranks.ranks.outside
    assert host_ranks.ranks.running == {0, 1}
    assert host_ranks.slots.free(time.monotonic() + 60) == [2], "it is tried again, not at once"


def test_exit_marker_kept_in_memory_counts_when_the_rank_is_reaped(host_ranks: Any) -> None:
    (host_ranks.dir / "session" / "0.words").write_text('{"end": "done", "detail": ""}')
    host_ranks.started[0].code = 0
    host_ranks.ranks.reap()
    assert host_ranks.ends == [(0, '{"end": "done", "detail": ""}', "")]
    assert json.loads((host_ranks.dir / "run" / "ranks" / "0.end").read_text())["end"] == "done"


class LeaseOfTest:
    """A lease that notes how it ended."""

    granted = 7

    def __init__(self, *_: Any, **__: Any) -> None:
        self.end = ""
        LeaseOfTest.last = self

    last: Any = None

    def start(self) -> None:
        pass

    def guards(self) -> list[Any]:
        return []

    def place(self, ranks: Any) -> bool:
        return True

    def leave(self) -> None:
        self.end = "left"

    def abandon(self) -> None:
        self.end = "runs out"


@pytest.mark.guarantee(
    "The launcher",
    "A supervisor survives exceptions; one that cannot work ends its host and declares its ranks dead or "
    "lets its lease expire.",
)
@pytest.mark.parametrize("silent", [False, True], ids=["etcd-answers", "etcd-is-silent"])
@pytest.mark.parametrize("where", ["start", "watch"])
def test_agent_that_fails_declares_its_ranks_dead_before_it_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool, where: str
) -> None:
    """If etcd is silent, its lease runs out. A lease that is given back would tell the others that no rank is
    missing."""
    etcd = Etcd()
    etcd.fails = EtcdError("silent") if silent else None
    for name, made in (
        ("HostLease", LeaseOfTest),
        ("client_of", lambda *_: etcd),
        ("client_of_kind", lambda *_: etcd),
        ("HangDetector", lambda *_: SimpleNamespace(look=lambda now: {})),
        ("_ORDER", 0.2 if silent else GENEROUS),
    ):
        monkeypatch.setattr(agents, name, made)
    order: list[str] = []
    if where == "watch":
        process = Process()
        monkeypatch.setattr(host_ranks_module, "start", lambda *_: process)
        monkeypatch.setattr(Supervisor, "watch", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(host_ranks_module, "start", lambda *_: 1 / 0)
    declare_all = EtcdSync.declare_all

    def declaring(self: EtcdSync, why: str, seconds: float, marker: str = "") -> bool:
        order.append(f"declared: {LeaseOfTest.last.end or 'the lease is held'}")
        return declare_all(self, why, seconds, marker)

    monkeypatch.setattr(EtcdSync, "declare_all", declaring)
    access = EtcdAccess(("h1:1",), "/j/")
    for name in ("run", "session"):
        (tmp_path / name).mkdir()
    part = HostPart(1, 1, 2, ("h1:1",), "j", "h1", None, "")
    spec = JobSpec(
        2, run_dir=str(tmp_path / "run"), session=str(tmp_path / "session"), host="h1", etcd=access
    )
    session: Any = SimpleNamespace(
        directory=tmp_path / "session", scratch=tmp_path, end=lambda: order.append("killed")
    )
    plan = HostPlan("run", "", {"h1": {"id": "i", "address": "a"}}, (Seat("h1", 0), Seat("h1", 1)))
    me = SimpleNamespace(host="h1", id="i")
    meeting: Any = SimpleNamespace(me=me, late=False, present=lambda plan: (plan, {"h1"}))
    with Witness(tmp_path / "run") as witness:
        request = LaunchRequest(Path("x"), timeout=0.0)
        agent = HostAgent(
            part, HostOptions(), request, spec, lambda spec: None, JobSignals(), witness, session
        )
        code = agent._run_job(meeting, plan, spec)
        assert agent._lifecycle.state is State.JUDGED
    assert code == 1
    assert order == ["killed", "declared: the lease is held"]
    recorded = job_lines(tmp_path / "run")
    assert [line["what"] for line in recorded] == ["start", "ending", "end"], "also if no rank was started"
    assert "ZeroDivisionError" in recorded[-1]["reason"]
    if silent:
        assert LeaseOfTest.last.end == "runs out"
    else:
        assert LeaseOfTest.last.end == "left"
        assert sorted(key[-1] for key in etcd.declared) == ["0", "1"]


def test_states_of_a_job_follow_each_other_and_are_entered_once() -> None:
    lifecycle = Lifecycle()
    for state in (State.RUNNING, State.ENDING, State.JUDGED):
        lifecycle.enter(state)
        for other in State:
            if other.value != state.value + 1:
                with pytest.raises(RuntimeError, match=f"{state.name} cannot be {other.name} next"):
                    lifecycle.enter(other)
    refused = Lifecycle()
    refused.enter(State.JUDGED)
    assert refused.state is State.JUDGED
