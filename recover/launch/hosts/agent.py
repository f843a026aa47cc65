"""The agent of a host: with those of the other hosts it starts a job on all of them, and looks after its own ranks.

No host is special. Each agent starts its ranks, sees their ends at once and declares them, holds the lease under which
they may vote, kills those that are stopped for too long, and takes all of them along when it ends itself, however that
is: see `guardian`. The verdict is made of what all agents say of their ranks, so it is the same everywhere.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from recover.job.grid import Grid
from recover.job.host_options import HostOptions, room_for
from recover.job.output import OUTLET, say
from recover.job.record_files import FILES
from recover.job.spec import EtcdAccess, JobSpec, Monitors
from recover.job.supervised import Supervised
from recover.launch import preflight
from recover.launch.hosts.addresses import interface_of_address, own_address
from recover.launch.hosts.etcd_sync import Clerk, Order
from recover.launch.hosts.guarded_client import GuardedClient
from recover.launch.hosts.hang_detection import Pulse, fence
from recover.launch.hosts.host_facts import facts_of, words_of
from recover.launch.hosts.host_ranks import HostRanks
from recover.launch.hosts.options import HostPart, access_to, one_host, read_options
from recover.launch.hosts.own_etcd import OwnEtcd, check_token
from recover.launch.hosts.placement import across
from recover.launch.hosts.rendezvous import HostPlan, Meeting
from recover.launch.hosts.replica_restarts import MISSED, Returns
from recover.launch.hosts.run_directory import SeenDirectories, keep_placement, open_shared_run_dir
from recover.launch.hosts.slots import HostSlots
from recover.launch.launcher import DEFAULT_TIMEOUT, catching
from recover.launch.preflight import Refusal
from recover.launch.session import Session
from recover.launch.witness import Witness
from recover.world.fabrics.etcd.access import LOST, client_of, client_of_kind
from recover.world.fabrics.etcd.client import UNIX, EtcdClient, EtcdError
from recover.world.fabrics.etcd.host_lease import HostLease, parts_of, without_lease
from recover.world.fabrics.etcd.server import socket_in
from recover.world.fabrics.etcd.slot_notes import EtcdNotes
from recover.world.liveness.board import Board
from recover.world.slot_notes import RunNotes

_ORDER = 3.0  # seconds that the others get to hear why this agent ends
_LINGER = 15.0  # seconds that an agent with etcd in its house waits for the others to leave
_LAST_WORDS = 5.0  # seconds that ranks get to end by themselves when etcd was silent for too long
_IMPATIENT = 1.0  # seconds for one request of the agent's own
_GIVEN_UP = 30.0  # seconds for the others to give up a host that comes back under its name


def launch_host(
    options: HostOptions,
    script: str | Path,
    args: Sequence[str] = (),
    *,
    replica_size: int = 1,
    run_dir: str | Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    hang_limit: float | None = None,
    link_timeout: float | None = None,
    carrier: str = "auto",
    faults: Sequence[str] | None = None,
    facts: Mapping[str, str] | None = None,
    check: Callable[[JobSpec], object] = lambda spec: None,
    module: bool = False,
    own: bool = False,
    monitors: Monitors = nullcontext,
) -> int:
    """Run this host's part of a job. Returns what `launch` does, the same on all hosts that stay to the end.

    `facts`: what else must be the same on all hosts, by name, in place of the script's arguments. `check` is called
    when it is settled who sits where, and may raise Refusal; what it gets is `joining` if the job is at work already.
    `module`, `own` and `beside` are as for `launch`.
    """
    script = Path(script)
    lock = None
    try:
        part = read_options(options)
        access = access_to(options, part)
        preflight.check_replica_size(replica_size, timeout)
        spec = JobSpec(
            part.least * part.slots,
            replica_size,
            preflight.check_carrier_between_hosts(carrier),
            preflight.check_hang_limit(hang_limit, timeout),
            link_timeout=preflight.check_link_timeout(link_timeout, timeout),
            host=part.host,
            etcd=access,
            records=own,
            admits=part.admits,
        )
        if part.returns:
            spec = replace(spec, room=room_for(replica_size))
        first = part.least * part.slots - part.standby * replica_size
        later = part.most * part.slots + spec.room - first
        spec = replace(spec, faults=preflight.check_faults(faults, first, replica_size, later))
        preflight.check_module(str(script)) if module else preflight.check_script(script)
        address = own_address(options.interface, _pairs(part), alone=part.most == 1)
        check_token(access, alone=part.most == 1)
        spec = replace(spec, address=address, interface=interface_of_address(address), lease=options.lease)
        preflight.warn_of_untested_torch()
        FILES.report = say
        directory, lock = open_shared_run_dir(Path(run_dir or Path("runs", part.job)), part.job)
        facts = facts_of(
            part, spec, script, module, options.lease, words_of(args) if facts is None else facts
        )
        named = ["-m", str(script)] if module else [str(script.absolute())]
        with (
            monitors(directory),
            Witness(directory, part.host) as witness,
            Session() as session,
            catching(lambda: _end_later(session)) as caught,
        ):
            if access.endpoints == (UNIX,):
                access = replace(access, endpoints=(socket_in(session.directory / "etcd"),))
            spec = replace(spec, run_dir=str(directory), session=str(session.directory), etcd=access)
            agent = Agent(part, spec, check, caught, witness)
            place = options.etcd_dir or session.directory / "etcd"
            with OwnEtcd(access, place, alone=part.most == 1) as etcd:
                code = agent.run(etcd, options, facts, [*named, *args], session, timeout)
        if caught:
            FILES.patience = 0.0
        FILES.settle()
        return code
    except Refusal as refusal:
        say(str(refusal))
        return 2
    except EtcdError as error:  # at the start; later a silence is waited for
        say(f"failed, {error}")
        return 1
    except KeyboardInterrupt:  # before or after the time in which we handle it
        return 128 + signal.SIGINT
    finally:
        OUTLET.finish()
        if lock is not None:
            os.close(lock)


def launch_alone(
    ranks: int, options: HostOptions, script: str | Path, args: Sequence[str] = (), **told: Any
) -> int:
    """All of a job on this host, whose lost replicas are started again: on etcd, with a member of its own."""
    size = told.get("replica_size", 1)
    try:
        preflight.check_numbers(ranks, size, told.get("timeout", DEFAULT_TIMEOUT))
        alone = one_host(ranks, size, options)
    except Refusal as refusal:
        say(str(refusal))
        return 2
    run_dir = told.get("run_dir") or preflight.default_run_dir(Path(script))
    return launch_host(alone, script, args, **told | {"run_dir": run_dir})


class Agent:
    def __init__(
        self,
        part: HostPart,
        spec: JobSpec,
        check: Callable[[JobSpec], object],
        caught: list[int],
        witness: Witness,
    ) -> None:
        assert spec.etcd is not None
        self._part, self._spec, self._check, self._caught = part, spec, check, caught
        self._access = spec.etcd  # to the keys of the job's name; those of the run lie below
        self._given_up = False  # by the others
        self._lost_at: float | None = None  # when it was settled that etcd will not answer any more
        self._witness = witness

    def run(
        self,
        etcd: OwnEtcd,
        options: HostOptions,
        facts: dict[str, str],
        command: Sequence[str],
        session: Session,
        timeout: float,
    ) -> int:
        """From the meeting of the hosts to the verdict."""
        client = etcd.find_or_start(options.join_timeout, lambda: self._caught)
        if self._caught:
            return self._ended_by(Order(self._part.host, "", self._caught[0]))
        assert self._spec.address is not None
        meeting = Meeting(client, self._part, self._spec.address, facts, self._spec.replica_size)
        try:
            plan, spec = self._meet(meeting, options)
        except InterruptedError:
            meeting.be_brief(_client(self._access, _IMPATIENT))
            meeting.leave()
            return self._ended_by(Order(self._part.host, "", self._caught[0]))
        except (Refusal, EtcdError) as refusal:
            meeting.be_brief(_client(self._access, _IMPATIENT))
            meeting.leave(str(refusal))
            if etcd.server is not None:
                self._linger(meeting, _ORDER)  # if all are refused, they must be able to read it
            meeting.clean()
            raise Refusal(str(refusal)) from None
        meeting.be_brief(_client(self._access, _IMPATIENT))
        try:
            return self._run_ranks(meeting, plan, spec, command, session, options, timeout)
        finally:
            meeting.leave()
            if etcd.server is not None:
                self._linger(meeting, _LINGER)
            meeting.clean()

    def _meet(self, meeting: Meeting, options: HostOptions) -> tuple[HostPlan, JobSpec]:
        """Who takes part, and what the ranks of this host are told."""
        stopped = lambda: self._caught  # noqa: E731
        assert self._spec.run_dir is not None
        with SeenDirectories(Path(self._spec.run_dir), meeting) as directories:
            meeting.enter(stopped)
            plan = meeting.wait_for_plan(options.join_timeout, stopped)
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
        self._check(replace(spec, joining=meeting.late))
        seats = dict(enumerate(plan.seats))
        keep_placement(Path(self._spec.run_dir), self._part.job, plan.hosts, seats, meeting.late)
        if meeting.late:
            others = ", ".join(host for host in plan.hosts if host != self._part.host)
            say(f"job {self._part.job} is at work, on {others}; this host brings free slots")
        return plan, spec

    def _run_ranks(
        self,
        meeting: Meeting,
        plan: HostPlan,
        spec: JobSpec,
        command: Sequence[str],
        session: Session,
        options: HostOptions,
        timeout: float,
    ) -> int:
        assert spec.etcd is not None
        host, part = self._part.host, self._part
        mine = {} if meeting.late else {rank: plan.seats[rank].slot for rank in plan.ranks_of(host)}
        access = replace(spec.etcd, patience=_IMPATIENT)
        ttl, grace = parts_of(options.lease)
        lease = HostLease(client_of(access), host, tuple(mine), ttl, lost=self._lose, agent=meeting.me.id)
        impatient = client_of_kind(GuardedClient, access)  # whatever else this agent writes
        impatient.guards = lease.guards
        board = Board(session.directory / "board", spec.board_size)
        grid = Grid.of(spec.ranks, spec.replica_size)
        notes = EtcdNotes(impatient, -1, RunNotes(spec.run_dir, -1))  # it speaks for others only
        pulse = Pulse(
            impatient, host, board, range(spec.board_size), grid, spec.hang_limit, notes, session.directory
        )
        look = functools.partial(fence, pulse, board, Path(str(spec.run_dir)))
        clerk = Clerk(impatient, meeting, plan, self._caught, look, lease.place, self._hear_of_loss(options))
        slots = HostSlots(part.slots, options.return_delay, options.forgive)
        if part.returns:
            clerk.returns = Returns(
                impatient, host, slots, spec.replica_size, spec.board_size, clerk.hear, grace + MISSED
            )
        if meeting.late:
            self._come_late(lease)
        else:
            lease.start()  # before any rank is there: what is started under no lease would be missed by nobody
            if spec.records:  # of an earlier run
                FILES.remove(Path(str(spec.run_dir), "summary.json"))
        kept = min(spec.replica_size, part.slots) if part.returns and options.ready else 0
        ranks: HostRanks | None = None
        failure, broken = "", f"the agent of host {host} was ended"
        try:
            clerk.start()
            self._witness.watch(spec, board)
            ranks = HostRanks(
                spec, mine, slots, part.slots, session, command, clerk.tell_end, kept, self._witness.held
            )
            if longer := lease.granted - ttl:
                seen = f"a lost host is seen after {options.lease + longer:g} s, not {options.lease:g}"
                say(f"etcd grants no lease under {lease.granted} s here: {seen}")
            must_end = functools.partial(self._must_end, clerk, ranks, timeout, bool(spec.across))
            failure = ranks.watch(timeout, must_end, lambda: clerk.ends)
            if failure:
                clerk.give_order(Order(host, failure))
            if failure or self._caught:
                _wait(lambda: clerk.order is not None, _ORDER)
            ranks.dismiss(ranks.running, "the job has come to its end")
            broken = ""
        except Exception as error:
            broken = f"the agent of host {host} has failed ({type(error).__name__}: {error})"
            say(f"{broken}, and ends its ranks\n{traceback.format_exc().rstrip()}")
        finally:
            with Supervised("the agent").part("wait for the end of its ranks"):
                if not self._given_up:  # else the others go on
                    self._witness.ending(failure or broken)
                session.end()
                if ranks is not None:
                    ranks.wait()
            # Unless all end with this host, the others would wait for ranks that are gone, and that nobody has declared
            # dead. What etcd does not take now, they learn when the lease has run out.
            known = self._given_up or clerk.order is not None or clerk.over
            known = known or clerk.declare_all(broken or f"host {host} has ended", _ORDER)
            clerk.stop()
            if known and not self._given_up:
                _quietly(lease.leave)
            else:
                lease.abandon()
        if self._caught:
            return self._ended_by(Order(self._part.host, "", self._caught[0]))
        if broken or ranks is None:
            return 1
        if self._given_up:
            logs = ranks.run_dir / "ranks"
            say(f"the others have given up host {self._part.host}, and go on without it (logs in {logs})")
            return 1
        order = clerk.order
        if order is not None and order.signal:
            return self._ended_by(order)
        ranks.take_over(clerk.ends)
        silent = "" if clerk.over else clerk.refusal or self._silence(self._access)
        there = f" (on {order.host})" if order is not None and order.host != self._part.host else ""
        return ranks.judge(f"{order.why}{there}" if order is not None else failure or silent)

    def _come_late(self, lease: HostLease) -> None:
        """A host of this name that was lost must be given up by the others before it can come back."""
        deadline = time.monotonic() + _GIVEN_UP
        while True:
            try:
                return lease.start()
            except ValueError as error:
                if self._caught or time.monotonic() > deadline:
                    raise Refusal(str(error)) from None
            time.sleep(0.2)

    def _look_for_newcomers(self, clerk: Clerk, ranks: HostRanks) -> None:
        ranks.admitted(clerk.counted)
        if clerk.returns is None:
            return
        while (newcomer := clerk.newcomer()) is not None:
            keep_placement(ranks.run_dir, self._part.job, clerk.hosts, clerk.seats, later=True)
            if newcomer.on(self._part.host):
                ranks.start_to_join(newcomer, len({seat.host for seat in newcomer.seats}) > 1)
        known = {rank for newcomer in list(clerk.returns.known.values()) for rank in newcomer.ranks}
        ranks.dismiss(ranks.outside - known, "its replica has lost a rank, and can never be whole")
        ranks.end_those_not_ready(clerk.returns.asked, self._part.warm_up)

    def _must_end(self, clerk: Clerk, ranks: HostRanks, timeout: float, across: bool) -> bool:
        if clerk.failed is not None:
            raise clerk.failed
        self._look_for_newcomers(clerk, ranks)
        if self._caught or self._given_up or clerk.order is not None:
            return True
        if clerk.over and ranks.running <= ranks.outside:
            return True
        if self._lost_at is None:
            if clerk.silent_since is None or time.monotonic() - clerk.silent_since < self._access.patience:
                return False
            # For good: one that waits for data from a host that it is cut off from would do so for ever.
            self._lost_at = time.monotonic()
        try:
            Path(str(self._spec.session), LOST).touch()
        except OSError:
            pass  # no memory: in the next look
        # They end by themselves; whoever computes comes to its vote first, and then saves what it has.
        patience = timeout if ranks.at_it() and not across else _LAST_WORDS
        return not ranks.running or time.monotonic() - self._lost_at > patience

    def _silence(self, access: EtcdAccess) -> str:
        return f"no etcd has answered at {', '.join(access.endpoints)} for {access.patience:g} s (--rdzv-patience)"

    def _hear_of_loss(self, options: HostOptions) -> Callable[[str, Sequence[int], str], None]:
        def hear(host: str, ranks: Sequence[int], why: str) -> None:
            self._witness.heard(host, ranks, why, options.lease if why == without_lease(host) else None)

        return hear

    def _lose(self) -> None:
        self._given_up = True

    def _ended_by(self, order: Order) -> int:
        there = f" on {order.host}" if order.host != self._part.host else ""
        say(f"ended by {signal.Signals(order.signal).name}{there}")
        return 128 + order.signal

    def _linger(self, meeting: Meeting, seconds: float) -> None:
        """Etcd stays for as long as another host may need it to take its leave."""
        try:
            _wait(lambda: not meeting.anybody(), seconds)
        except EtcdError:
            pass  # most of its members have gone


def _client(access: EtcdAccess, patience: float) -> EtcdClient:
    return client_of(replace(access, patience=patience))


def _pairs(part: HostPart) -> list[tuple[str, int]]:
    if part.endpoints == (UNIX,):
        return [("127.0.0.1", 1)]
    pairs = (endpoint.rpartition(":") for endpoint in part.endpoints)
    return [(host.strip("[]"), int(port)) for host, _, port in pairs]


def _end_later(session: Session) -> None:
    """In a signal handler. The main loop tells the others first; but a reader of our output may keep it for ever."""
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
