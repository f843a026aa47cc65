"""The agent of a host: with the agents of the other hosts it starts a job on all of them, and
supervises its own ranks.

No host is special. Each agent starts its ranks, sees their ends at once and declares them, holds
the lease under which they may vote, kills those that are stopped for too long, and ends all of them
when it ends itself, however that is: see `guardian`. The verdict is made of what all agents report
of their ranks, so it is the same on all hosts.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recover.job.grid import Grid
from recover.job.host_options import LEAVE, HostOptions, room_for
from recover.job.output import say
from recover.job.record_files import FILES
from recover.job.spec import EtcdAccess, JobSpec
from recover.job.supervised import Supervised
from recover.launch import preflight
from recover.launch.hosts.addresses import interface_of_address, own_address
from recover.launch.hosts.coordination import HostCoordination
from recover.launch.hosts.departure import Departure
from recover.launch.hosts.etcd_sync import EtcdSync, Order
from recover.launch.hosts.guarded_client import GuardedClient
from recover.launch.hosts.hang_detection import HangDetector, fence
from recover.launch.hosts.host_facts import facts_of, words_of
from recover.launch.hosts.host_ranks import HostRanks
from recover.launch.hosts.options import HostPart, access_to, one_host, read_options
from recover.launch.hosts.own_etcd import OwnEtcd, check_token
from recover.launch.hosts.placement import across
from recover.launch.hosts.rendezvous import HostPlan, Rendezvous
from recover.launch.hosts.replica_restarts import MISSED, ReplicaRestarts
from recover.launch.hosts.run_directory import SeenDirectories, open_shared_run_dir, write_placement
from recover.launch.hosts.slots import SET_ASIDE, HostSlots
from recover.launch.launcher import exit_code_of, held, say_stopped
from recover.launch.preflight import Refusal
from recover.launch.request import LaunchRequest
from recover.launch.session import Session
from recover.launch.signals import JobSignals
from recover.launch.supervisor import Lifecycle, State, Supervisor
from recover.launch.witness import Witness
from recover.runs.records.job_log import ADDRESS
from recover.world.fabrics.etcd.access import client_of, client_of_kind
from recover.world.fabrics.etcd.client import UNIX, EtcdClient, EtcdError
from recover.world.fabrics.etcd.host_lease import HostLease, parts_of, without_lease
from recover.world.fabrics.etcd.server import socket_in
from recover.world.fabrics.etcd.slot_notes import EtcdNotes
from recover.world.liveness.board import Board
from recover.world.slot_notes import RunNotes

_ORDER = 3.0  # seconds for the other hosts to hear why this agent ends
_LINGER = 15.0  # seconds that an agent with a member of etcd waits for the others to leave
_IMPATIENT = 1.0  # seconds for one request of the agent's own
_GIVEN_UP = 30.0  # seconds for the others to declare a host dead that rejoins under its name


def launch_host(
    options: HostOptions,
    request: LaunchRequest,
    *,
    facts: Mapping[str, str] | None = None,
    check: Callable[[JobSpec], object] = lambda spec: None,
) -> int:
    """Run this host's part of a job. Returns what `launch` does, the same on all hosts that stay to
    the end.

    `facts`: values by name that must be the same on all hosts, in place of the script's arguments.
    `check` is called when the placement is decided, and may raise Refusal; the job that it gets is
    `joining` if it runs already.
    """
    return exit_code_of(lambda: _launch_host(options, request, facts, check))


def launch_alone(ranks: int, options: HostOptions, request: LaunchRequest) -> int:
    """Run all of a job on this host, and restart its lost replicas: on etcd, with a member of its
    own."""
    try:
        preflight.check_numbers(ranks, request.replica_size, request.timeout)
        alone = one_host(ranks, request.replica_size, options)
    except Refusal as refusal:
        say(str(refusal))
        return 2
    run_dir = request.run_dir or preflight.default_run_dir(request.script)
    return launch_host(alone, replace(request, run_dir=run_dir))


def _launch_host(
    options: HostOptions,
    request: LaunchRequest,
    facts: Mapping[str, str] | None,
    check: Callable[[JobSpec], object],
) -> int:
    part = read_options(options)
    access = access_to(options, part)
    spec = _check(options, part, access, request)
    preflight.warn_of_untested_torch()
    FILES.report = say
    directory, lock = open_shared_run_dir(request.run_dir or Path("runs", part.job), part.job)
    more = words_of(request.args) if facts is None else facts
    facts = facts_of(part, spec, request.script, request.module, options.lease, more)
    signals, code = request.signals or JobSignals(), 1
    with held(lock):
        try:
            with (
                request.monitors(directory),
                Witness(directory, part.host) as witness,
                Session(directory / ADDRESS) as session,
                nullcontext() if request.signals else signals,
                signals.ending(lambda: _end_later(session)),
            ):
                if access.endpoints == (UNIX,):
                    access = replace(access, endpoints=(socket_in(session.directory / "etcd"),))
                spec = replace(spec, run_dir=str(directory), session=str(session.directory), etcd=access)
                place = options.etcd_dir or session.directory / "etcd"
                agent = HostAgent(part, options, request, spec, check, signals, witness, session)
                with OwnEtcd(access, place, alone=part.most == 1) as etcd:
                    code = agent.run(etcd, facts)
        except EtcdError as error:  # at the start; later a silence is waited for
            say(f"failed, {error}")
            return 1
        say_stopped(code, signals, request, directory)
        FILES.settle()
        return signals.code(code)


def _check(options: HostOptions, part: HostPart, access: EtcdAccess, request: LaunchRequest) -> JobSpec:
    """The job as this host was asked for it. Raises Refusal."""
    replica_size, timeout = request.replica_size, request.timeout
    preflight.check_replica_size(replica_size, timeout)
    spec = JobSpec(
        part.least * part.slots,
        replica_size,
        preflight.check_carrier_between_hosts(request.carrier),
        preflight.check_hang_limit(request.hang_limit, timeout),
        link_timeout=preflight.check_link_timeout(request.link_timeout, timeout),
        host=part.host,
        etcd=access,
        records=request.is_user_script,
        admits=part.admits,
        room=room_for(replica_size) if part.returns else 0,
        lease=options.lease,
        leaves=_leaves_on_term(options, part),
    )
    first = part.least * part.slots - part.standby * replica_size
    later = part.most * part.slots + spec.room - first
    faults = preflight.check_faults(request.faults, first, replica_size, later)
    request.check_script()
    address = own_address(options.interface, _pairs(part), alone=part.most == 1)
    check_token(access, alone=part.most == 1)
    return replace(spec, faults=faults, address=address, interface=interface_of_address(address))


@dataclass(frozen=True)
class _HostJob:
    """The objects of one job on this host, in the states RUNNING and later."""

    spec: JobSpec
    lease: HostLease
    sync: EtcdSync
    ranks: HostRanks
    supervisor: Supervisor
    departure: Departure


class HostAgent:
    """The agent of one host, from the rendezvous to the exit code.

    `check`: see `launch_host`. `signals` to this process end the job on all hosts, except SIGTERM
    where this host can leave.
    """

    def __init__(
        self,
        part: HostPart,
        options: HostOptions,
        request: LaunchRequest,
        spec: JobSpec,
        check: Callable[[JobSpec], object],
        signals: JobSignals,
        witness: Witness,
        session: Session,
    ) -> None:
        assert spec.etcd is not None
        self._part, self._options, self._request, self._spec = part, options, request, spec
        self._check, self._witness, self._session = check, witness, session
        self._signals, self._caught = signals, signals.caught
        self._access = spec.etcd  # to the keys of the job's name; those of the run lie below
        self._given_up = threading.Event()  # declared dead by other hosts; set by the thread of the lease
        self._lifecycle = Lifecycle()

    def run(self, etcd: OwnEtcd, facts: Mapping[str, str]) -> int:
        """Run from the rendezvous of the hosts to the verdict."""
        client = etcd.find_or_start(self._options.join_timeout, lambda: self._caught)
        if self._caught:
            return self._ended_by_signal()
        assert self._spec.address is not None
        self._etcd = etcd
        rendezvous = Rendezvous(client, self._part, self._spec.address, facts, self._spec.replica_size)
        try:
            plan, spec = self._meet(rendezvous)
        except InterruptedError:
            rendezvous.use_client(_client(self._access, _IMPATIENT))
            rendezvous.leave()
            return self._ended_by_signal()
        except (Refusal, EtcdError) as refusal:
            rendezvous.use_client(_client(self._access, _IMPATIENT))
            rendezvous.leave(str(refusal))
            if etcd.server is not None:
                self._linger(rendezvous, _ORDER)  # if all are refused, they must be able to read why
            rendezvous.clean()
            raise Refusal(str(refusal)) from None
        rendezvous.use_client(_client(self._access, _IMPATIENT))
        try:
            return self._run_job(rendezvous, plan, spec)
        finally:
            rendezvous.leave()
            if etcd.server is not None and not self._signals.left:
                self._linger(rendezvous, _LINGER)
            rendezvous.clean()

    def _meet(self, rendezvous: Rendezvous) -> tuple[HostPlan, JobSpec]:
        """State RENDEZVOUS: which hosts take part, and the job as the ranks of this host read
        it."""
        stopped = lambda: self._caught  # noqa: E731
        assert self._spec.run_dir is not None
        with SeenDirectories(Path(self._spec.run_dir), rendezvous) as directories:
            rendezvous.enter(stopped)
            plan = rendezvous.wait_for_plan(self._options.join_timeout, stopped)
            token = plan.token or self._part.token
            access = replace(self._access, prefix=f"{self._access.prefix}{plan.run}/", token=token)
            groups = directories.compare(client_of(access), plan, stopped)
        spec = replace(
            self._spec,
            ranks=len(plan.seats),
            etcd=access,
            token=token,
            across=across(plan.seats, self._spec.replica_size),
            directories=groups,
            limit=len(plan.seats) if self._part.standby else None,
        )
        self._check(replace(spec, joining=rendezvous.late))
        seats = dict(enumerate(plan.seats))
        write_placement(Path(self._spec.run_dir), self._part.job, plan.hosts, seats, rendezvous.late)
        if rendezvous.late:
            others = ", ".join(host for host in plan.hosts if host != self._part.host)
            say(f"job {self._part.job} is at work, on {others}; this host brings free slots")
        return plan, spec

    def _run_job(self, rendezvous: Rendezvous, plan: HostPlan, spec: JobSpec) -> int:
        """States RUNNING, ENDING and JUDGED."""
        job = self._assemble(rendezvous, plan, spec)
        self._take_lease(job.lease, rendezvous.late)
        if spec.records and not rendezvous.late:  # of an earlier run
            FILES.remove(Path(str(spec.run_dir), "summary.json"))
        failure, broken = "", f"the agent of host {self._part.host} was ended"
        try:
            failure = self._watch(job)
            broken = ""
        except Exception as error:
            broken = f"the agent of host {self._part.host} has failed ({type(error).__name__}: {error})"
            say(f"{broken}, and ends its ranks\n{traceback.format_exc().rstrip()}")
        finally:
            self._end(job, failure, broken)
        return self._judge(job, failure, broken)

    def _assemble(self, rendezvous: Rendezvous, plan: HostPlan, spec: JobSpec) -> _HostJob:
        """Make the objects of the job on this host. Nothing is started here."""
        assert spec.etcd is not None
        part, options, host, session = self._part, self._options, self._part.host, self._session
        first = {} if rendezvous.late else {rank: plan.seats[rank].slot for rank in plan.ranks_of(host)}
        access = replace(spec.etcd, patience=_IMPATIENT)
        ttl, grace = parts_of(options.lease)
        lost, agent = self._given_up.set, rendezvous.me.id
        lease = HostLease(client_of(access), host, tuple(first), ttl, lost=lost, agent=agent)
        client = client_of_kind(GuardedClient, access)  # for all other writes of this agent
        client.guards = lease.guards
        marks = Path(str(spec.run_dir), SET_ASIDE, host)
        slots = HostSlots(part.slots, options.return_delay, options.forgive, marks)
        kept = min(spec.replica_size, part.slots) if part.returns and options.ready else 0
        board, grid = (
            Board(session.directory / "board", spec.board_size),
            Grid.of(spec.ranks, spec.replica_size),
        )
        notes = EtcdNotes(client, -1, RunNotes(spec.run_dir, -1))  # the agent speaks for its ranks only
        rows = range(spec.board_size)
        detector = HangDetector(client, host, board, rows, grid, spec.hang_limit, notes, session.directory)
        fence_hung = functools.partial(fence, detector, board, Path(str(spec.run_dir)))
        sync = EtcdSync(client, rendezvous, plan, self._caught, fence_hung, lease.place, self._hear_of_loss)
        if part.returns:
            sync.restarts = ReplicaRestarts(
                client, host, slots, spec.replica_size, spec.board_size, sync.add_restarted, grace + MISSED
            )
        departure = Departure(
            session.directory,
            Path(str(spec.run_dir)),
            host,
            options.grace,
            lambda: self._obstacle_to_leave(sync),
        )
        command, refused = self._request.command, self._witness.held
        ranks = HostRanks(spec, first, slots, part.slots, session, command, sync.report_end, kept, refused)
        coordination = HostCoordination(
            sync, ranks, part, spec, self._access.patience, self._request.timeout, self._given_up, departure
        )
        supervisor = Supervisor(
            spec, ranks, session, self._witness, self._caught, coordination, self._lifecycle
        )
        return _HostJob(spec, lease, sync, ranks, supervisor, departure)

    def _take_lease(self, lease: HostLease, late: bool) -> None:
        """Register the lease before any rank is started: if this host were lost without a lease, no
        other host would declare its ranks dead.

        A lost host of this name must be declared dead by the others before it can rejoin.
        """
        deadline = time.monotonic() + _GIVEN_UP
        while True:
            try:
                return lease.start()
            except ValueError as error:
                if not late:
                    raise
                if self._caught or time.monotonic() > deadline:
                    raise Refusal(str(error)) from None
            time.sleep(0.2)

    def _watch(self, job: _HostJob) -> str:
        """State RUNNING, until the job has ended or is to be ended. Returns why it has failed, or
        ""."""
        job.supervisor.start()
        self._signals.ask = functools.partial(self._request.ask_to_stop, self._session.directory)
        self._listen_for_notices(job.departure)
        ttl, _ = parts_of(self._options.lease)
        if longer := job.lease.granted - ttl:
            lease = self._options.lease
            seen = f"a lost host is seen after {lease + longer:g} s, not {lease:g}"
            say(f"etcd grants no lease under {job.lease.granted} s here: {seen}")
        failure = job.supervisor.watch(self._request.timeout)
        if failure:
            job.sync.give_order(Order(self._part.host, failure))
        if failure or self._caught:
            _wait(lambda: job.sync.view.order is not None, _ORDER)
        job.ranks.dismiss(job.ranks.running, "the job has come to its end")
        if job.departure.is_leaving and not job.departure.has_left and job.departure.was_signalled:
            # All hosts were asked to leave, or too few replicas would have stayed: the job was stopped.
            self._signals.asked = self._signals.asked or signal.SIGTERM
        self._signals.left = job.departure.has_left
        return failure

    def _listen_for_notices(self, departure: Departure) -> None:
        departure.clear_request()
        departure.stop = functools.partial(self._signals.stop, signal.SIGTERM)
        if _leaves_on_term(self._options, self._part):
            self._signals.leave = departure.notice
            if len(self._access.endpoints) == 1 and (why := self._etcd.needs_this_host()):
                say(f"SIGTERM to this host stops the whole job: {why}, and the others can go on without it")

    def _obstacle_to_leave(self, sync: EtcdSync) -> str:
        if self._part.most == 1:
            return "it is the only host of the job; end the job by SIGTERM"
        if not sync.view.has_whole_replica_beside(self._part.host, self._spec.replica_size):
            return "no other host holds a whole replica"
        return self._etcd.needs_this_host()  # last, because it reserves the departure of the member

    def _end(self, job: _HostJob, failure: str, broken: str) -> None:
        """State ENDING. `broken`: why this agent could not come to the end of the job, or ""."""
        given_up = self._given_up.is_set()  # if so, the others go on, and the job does not end
        left, marker = job.departure.has_left and not (given_up or broken), ""
        if left:
            marker = job.ranks.leave_at_once(job.departure.words)
        with Supervised("the agent").part("wait for the end of its ranks"):
            job.supervisor.end(failure or broken, is_told=not (given_up or left))
        self._witness.outcome = self._outcome(job.sync.view.order, failure, broken)
        # Unless all hosts end now, the others would wait for ranks that have ended and were never
        # declared dead. Deaths that etcd does not take now become known when the lease has run out.
        view = job.sync.view
        known = given_up or view.order is not None or view.over
        why = job.departure.words if left else broken or f"host {self._part.host} has ended"
        known = known or job.sync.declare_all(why, _ORDER, marker)
        job.departure.note_end()
        job.sync.stop()
        # A lease that is given back says that no rank of this host is missing.
        if known and not given_up:
            _quietly(job.lease.leave)
        else:
            job.lease.abandon()

    def _outcome(self, order: Order | None, failure: str, broken: str) -> dict[str, Any]:
        """How the job has ended, for its records. `left`: for this host alone."""
        if outcome := self._signals.outcome():
            # The others know nothing of a signal here if no order to end the job was stored.
            is_alone = self._given_up.is_set() or (bool(self._signals.caught) and order is None)
            return outcome | ({"left": True} if is_alone else {})
        if self._given_up.is_set():
            broken = f"host {self._part.host} was declared lost, and the other hosts went on without it"
        elif self._signals.left and not broken:
            broken = f"host {self._part.host} left on notice, and the other hosts went on without it"
        if broken:
            return {"left": True, "reason": broken}
        if order is not None and order.signal:
            return {"signal": signal.Signals(order.signal).name, "by": order.host}
        reason = order.why if order is not None else failure
        return {"reason": reason} if reason else {}

    def _judge(self, job: _HostJob, failure: str, broken: str) -> int:
        """State JUDGED, with the exit code."""
        host, view = self._part.host, job.sync.view
        order = view.order
        if self._caught:
            return self._ended_by_signal()
        if broken:
            return self._judged(1)
        if self._given_up.is_set():
            logs = Path(str(job.spec.run_dir)) / "ranks"
            say(f"host {host} was declared lost, and the other hosts go on without it (logs in {logs})")
            return self._judged(1)
        if job.departure.has_left:
            return self._has_left(job)
        if order is not None and order.signal:
            return self._ended_by(order)
        job.supervisor.take_over(view.ends)
        silent = "" if view.over else view.refusal or self._silence()
        there = f" (on {order.host})" if order is not None and order.host != host else ""
        return job.supervisor.judge(f"{order.why}{there}" if order is not None else failure or silent)

    def _has_left(self, job: _HostJob) -> int:
        there = ", ".join(name for name in job.sync.view.hosts if name != self._part.host)
        how = f"at once, because {job.departure.at_once}" if job.departure.at_once else "as asked"
        say(f"host {self._part.host} has left job {self._part.job} {how}; the job continues on {there}")
        return self._judged(128 + signal.SIGTERM if job.departure.at_once else 0)

    def _silence(self) -> str:
        endpoints, patience = ", ".join(self._access.endpoints), self._access.patience
        return f"no etcd has answered at {endpoints} for {patience:g} s (--rdzv-patience)"

    def _hear_of_loss(self, host: str, ranks: Sequence[int], why: str) -> None:
        self._witness.heard(host, ranks, why, self._options.lease if why == without_lease(host) else None)

    def _ended_by_signal(self) -> int:
        return self._ended_by(Order(self._part.host, "", self._caught[0]))

    def _ended_by(self, order: Order) -> int:
        there = f" on {order.host}" if order.host != self._part.host else ""
        end = self._request.describe_end(Path(str(self._spec.run_dir)))
        say(f"ended by {signal.Signals(order.signal).name}{there}{end}")
        return self._judged(128 + order.signal)

    def _judged(self, code: int) -> int:
        """Enter state JUDGED without a verdict of the ranks."""
        self._lifecycle.enter(State.JUDGED)
        return code

    def _linger(self, rendezvous: Rendezvous, seconds: float) -> None:
        """Keep the member of etcd on this host for up to `seconds`: other hosts may need it to leave."""
        try:
            _wait(lambda: not rendezvous.anybody(), seconds)
        except EtcdError:
            pass  # most of its members have gone


def _leaves_on_term(options: HostOptions, part: HostPart) -> bool:
    return options.on_term == LEAVE and part.most > 1


def _client(access: EtcdAccess, patience: float) -> EtcdClient:
    return client_of(replace(access, patience=patience))


def _pairs(part: HostPart) -> list[tuple[str, int]]:
    if part.endpoints == (UNIX,):
        return [("127.0.0.1", 1)]
    pairs = (endpoint.rpartition(":") for endpoint in part.endpoints)
    return [(host.strip("[]"), int(port)) for host, _, port in pairs]


def _end_later(session: Session) -> None:
    """End this host's part of the job after a delay, from a signal handler. The main loop tells the
    other hosts first, but a reader of our output may block it."""
    timer = threading.Timer(2 * _ORDER, session.end)
    timer.daemon = True
    timer.start()


def _wait(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _quietly(act: Callable[[], object]) -> None:
    try:
        act()
    except EtcdError:
        pass  # leases run out by themselves
