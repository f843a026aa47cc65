"""Consequences of the other hosts of a job, and of the silence of etcd, for the ranks of this host."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from recover.job.spec import JobSpec
from recover.launch.hosts.departure import Departure
from recover.launch.hosts.etcd_sync import EtcdSync
from recover.launch.hosts.host_ranks import HostRanks
from recover.launch.hosts.options import HostPart
from recover.launch.hosts.run_directory import write_placement
from recover.world.fabrics.etcd.access import LOST

_LAST_WORDS = 5.0  # seconds for ranks to end by themselves when etcd was silent for too long


class HostCoordination:
    """The `Coordination` of a supervisor: what the other hosts, and a silent etcd, mean for the ranks here.

    `patience`: seconds that etcd may be silent. `timeout`: that of the job. `given_up`: set when
    the other hosts go on without this one. `departure`: whether this host leaves on notice.
    """

    def __init__(
        self,
        sync: EtcdSync,
        ranks: HostRanks,
        part: HostPart,
        spec: JobSpec,
        patience: float,
        timeout: float,
        given_up: threading.Event,
        departure: Departure,
    ) -> None:
        self._sync, self._ranks, self._part, self._spec = sync, ranks, part, spec
        self._patience, self._timeout, self._given_up = patience, timeout, given_up
        self._departure = departure
        self._lost_at: float | None = None  # when etcd was taken for lost

    def start(self) -> None:
        self._sync.start()

    def ends(self) -> Mapping[int, str]:
        return self._sync.view.ends

    def must_end(self) -> bool:
        """Whether the ranks of this host are to be ended. Raises SupervisorError if the exchange
        with etcd has failed."""
        if (failure := self._sync.view.failure) is not None:
            raise failure
        self._ranks.admit(self._sync.view.counted)
        if self._part.returns:
            self._start_restarted_replicas()
        view = self._sync.view
        if self._given_up.is_set() or view.order is not None:
            return True
        if view.over and self._ranks.running <= self._ranks.outside:
            return True
        is_leaving = self._departure.look()
        if self._departure.was_asked:
            self._sync.give_notice()
            if view.all_hosts_noticed:
                self._departure.tell_all_were_asked()
        if is_leaving and self._has_left():
            return True
        if self._lost_at is None:
            if view.silent_since is None or time.monotonic() - view.silent_since < self._patience:
                return False
            # For good, even if etcd answers later: a rank that waits for data from a host that it
            # is cut off from would wait for ever.
            self._lost_at = time.monotonic()
        return self._have_ended_without_etcd(self._lost_at)

    def _has_left(self) -> bool:
        """Whether this host is through with leaving: no rank of the job runs here any more, or it leaves
        at once."""
        ranks = self._ranks
        ranks.close()
        # A rank that has asked to join may be admitted at this moment. It leaves by a vote as the others do:
        # killing it now would cost them a repair.
        ranks.dismiss(ranks.outside - self._sync.view.asked, "its host leaves the job")
        # A script that has come to its end has stopped with all others: the job is over, not left.
        have_left = ranks.running <= ranks.outside and not ranks.finished
        if have_left and not self._departure.at_once and ranks.lost_on_leaving:
            # For example because of the script's handler for SIGTERM: the others have lost these replicas.
            lost = ", ".join(f"rank {rank}: {why}" for rank, why in sorted(ranks.lost_on_leaving.items()))
            self._departure.at_once = f"ranks ended before they could leave ({lost})"
        self._departure.has_left = have_left or bool(self._departure.at_once)
        return self._departure.has_left

    def _have_ended_without_etcd(self, lost_at: float) -> bool:
        """Tell the ranks that etcd is lost, so that they end by themselves. A rank that computes
        first comes to its vote, and then saves its state, so it gets the time for that, unless its
        replica lies on several hosts."""
        try:
            Path(str(self._spec.session), LOST).touch()
        except OSError:
            pass  # no memory: tried again in the next pass
        computes = self._ranks.is_computing() and not self._spec.across
        patience = (self._timeout or math.inf) if computes else _LAST_WORDS  # a timeout of 0: never
        return not self._ranks.running or time.monotonic() - lost_at > patience

    def _start_restarted_replicas(self) -> None:
        sync, ranks, host = self._sync, self._ranks, self._part.host
        while (replica := sync.next_restarted()) is not None:
            view = sync.view  # newer than the replica, so it has the replica's seats
            write_placement(Path(str(self._spec.run_dir)), self._part.job, view.hosts, view.seats, later=True)
            if replica.on(host):
                ranks.start_joining_ranks(replica, len({seat.host for seat in replica.seats}) > 1)
        view = sync.view  # read after the last replica was taken, so it knows all that were started
        ranks.dismiss(ranks.outside - view.restarted, "its replica has lost a rank, and can never be whole")
        ranks.end_ranks_not_ready(view.asked, self._part.warm_up)
