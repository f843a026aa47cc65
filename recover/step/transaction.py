"""One iteration as a transaction: run a share, reduce, vote; after a death repair and deal again, until it commits.

The verdict is one agreement over the whole world. Nothing that the optimizer could see changes before it. What a
death costs is decided from the census alone, so all survivors decide alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from recover.gradients import ledger
from recover.gradients.deferred import Later, fetch, now
from recover.gradients.exponents import code_of
from recover.policy import FailureEvent, Policy, RestoreMode, SlotSet
from recover.step import poisoned_sample
from recover.step.difference import UNKNOWN, Digest, Inquiry
from recover.step.drift import DriftVerdict, judge, named
from recover.step.errors import StateDivergedError
from recover.step.incident import Incident, met
from recover.step.maxima import Maxima
from recover.step.record import Arrival, Record
from recover.step.seniority import Seniority
from recover.step.totals import Totals
from recover.step.vote import Vote, asking_bits, vote_word
from recover.world.census import Census, left_behind
from recover.world.membership import NoCarrierError
from recover.world.world import World

if TYPE_CHECKING:  # tensors are the sums' own business
    from recover.gradients.buckets import Bucket
    from recover.gradients.module_gradients import Gradients
    from recover.gradients.replica_interface import Replica
    from recover.gradients.running_buffers import MovingBuffers

FRUITLESS = 8  # repairs in a row without a death, after which the run ends


class Transaction:
    """The state of the step under way on this rank."""

    def __init__(
        self,
        world: World,
        gradients: Gradients,
        policy: Policy,
        global_batch: int,
        replica: Replica,
        moving: MovingBuffers,
    ) -> None:
        self.world, self.gradients, self.policy, self.global_batch = world, gradients, policy, global_batch
        self.replica, self.moving = replica, moving
        self.index = 0
        self.fingerprint: int | Later[int] = 0
        self.incidents: list[Incident] = []
        self.finite = self._fits = True
        self.grad_norm = 0.0
        self.stop_requested = False
        self.stop_agreed = self.all_quiet = False
        self.is_quiet: Callable[[], bool] = lambda: True
        self.asked = False  # all who have committed the last step saw the same replica ask
        self.arrival: Arrival | None = None  # of a rank that joins, until it holds the state of the others
        self.newcomers: tuple[int, tuple[int, ...]] = 0, ()  # the step before which replicas came, and which
        self.seniority = Seniority()
        self.entries: Callable[[], Sequence[Digest]] = (
            tuple  # of this rank's state, once a vote has found others
        )
        self._inquiry = Inquiry(lambda: self.entries())
        replicas = world.replicas if world.outside else tuple(range(world.grid.replicas))
        self.totals = Totals(global_batch, replicas, moving.size)
        self.maxima = Maxima(gradients.sum.exponents)
        # The step that was given up here and is not begun again yet, and the epoch of that.
        self._left: tuple[int, int] | None = None
        self.begin(0, 0)

    def leave(self) -> None:
        """This rank gives the step up, and will begin it again."""
        self._left = self.index, self.world.epoch

    def begin(self, index: int, fingerprint: int | Later[int]) -> None:
        """Step number `index` begins, from parameters with this fingerprint."""
        # A repair takes all. If there was one since this rank left, nobody is inside of the step any more.
        again, left, self._left = (index, self.world.epoch) == self._left, self._left, None
        if not again:
            self._since = self.world.epoch
        self.index, self.fingerprint = index, fingerprint
        # Who was lost before the step was left is told when it commits.
        if left is None or left[0] != index:
            self.incidents = []
        self._places = [(time.time(), "backward")]
        self._fruitless = 0  # repairs in a row that found nobody dead
        if self.gradients.sum.exponents is not None:
            self.gradients.sum.exponents.begin(index)
        # Where this replica left the step and others were dealt its slots meanwhile, they do not hold what the layout
        # says: bring nothing, and be dealt to.
        self._start_over(brings_nothing=again and self._since != self.world.epoch)

    def _start_over(self, brings_nothing: bool = False) -> None:
        """Nothing is summed, buffers are as they were when the step began, and the layout is that of a new step."""
        self.gradients.begin()
        self.moving.begin()
        # Of this replica's slots, with their weights.
        self._losses: list[tuple[float | Later[float], float]] = []
        self.totals.begin(len(self.gradients.parameters))
        self._tainted = self._overflowed = False
        self._squared_norm = 0.0
        resting = self._resting
        busy = [replica for replica in self.world.replicas if replica not in resting]
        self.layout = self.policy.layout(busy, self.global_batch).with_resting(resting)
        self.share = self.layout.share(self.world.replica)
        if brings_nothing:
            self.share = replace(self.share, run=SlotSet())
        self._planned = self.layout.committed  # samples in the sum over all replicas
        self._done = self.share.kept
        self._samples: dict[int, int] = {}
        self._computed: list[tuple[float | Later[float], int]] = []

    @property
    def _resting(self) -> tuple[int, ...]:
        """Replicas that have joined before this step and run none of its microbatches, as long as others do.

        The user's code in front of the loop over microbatches has run on them at step 0, before they had the state of
        the others: what it has drawn or computed for the loop is not what it is on the others.
        """
        since, newcomers = self.newcomers
        resting = [replica for replica in self.world.replicas if since == self.index and replica in newcomers]
        return tuple(resting) if len(resting) < len(self.world.replicas) else ()

    @property
    def contributed(self) -> list[int]:
        """The samples in this replica's sum; a spare contributes none."""
        return sorted(self._samples.values()) if self.share.counts else []

    def attempts(
        self, cut: Callable[[list[int]], list[list[int]]], overlap: bool, given_up: Callable[[], None]
    ) -> Iterator[tuple[list[int], str, bool]]:
        """Until the step commits: slots to run, the place this is for faults, and whether buckets are posted meanwhile.

        `cut` makes pieces of a share. `overlap`: buckets are posted while the last piece runs, otherwise after it.
        `given_up` is told that what this replica had run does not enter the step.
        """
        place = "forward"
        while True:
            started = time.perf_counter()
            pieces = cut(list(self.share.run))
            for piece in pieces:
                yield piece, place, overlap and piece is pieces[-1]
            if not (pieces and overlap):
                self.gradients.post_all(self.post)
            committed = self.vote()
            if self.incidents:
                self.incidents[-1].redo_ms = (time.perf_counter() - started) * 1e3
            if self._overflowed:
                self._rerun()
                given_up()
                place = "forward"
                continue
            if committed or self.recover():
                return
            if not self.share.kept:
                given_up()
            place = "extra"

    def computed(self, seconds: float | Later[float], microbatches: int) -> None:
        """So long it took this rank to run these."""
        self._computed.append((seconds, microbatches))

    def finish_slot(self, slot: int, sample: int, loss: float | Later[float], weight: float) -> None:
        """A microbatch is in the local sum, or will be when the device comes to it: so its loss is read at the vote."""
        self._samples[slot] = sample
        self._losses.append((loss, weight))
        self._done = self._done | self._done.span(slot, slot + 1)

    def post(self, index: int, bucket: Bucket) -> None:
        """Start the reduction of a full bucket. Errors show at the vote, never here."""
        if index == 0:
            self._places.append((time.time(), "in-reduce"))
        self.world.hooks("bucket", index)
        work = bucket.post(self.world.cross, self.world.epoch, self.share.counts)
        self.world.hooks.under_way("in-reduce", work, index)

    def vote(self) -> bool:
        """All slots are run and all buckets are posted: is it a step? The same answer on all survivors."""
        ledger.check_buckets(self.index, self.gradients.buckets, self.share.kept | self.share.run)
        self._wait_for_device()
        self.world.board.come_to_vote(self.world.rank)
        self.totals.clear()
        if self.share.counts:
            self.totals.contribute(
                self._loss,
                self._weight,
                self._samples,
                self.moving.changes,
                self.gradients.usage,
            )
        self.totals.say(now(self.fingerprint), self.world.replica, self._pace)
        work = self.totals.post(self.world.cross, self.world.epoch)
        self.maxima.post(self.world.cross, self.world.epoch, self._codes if self.share.counts else None)
        self.world.hooks.under_way("in-totals", work)
        self._squared_norm = self.gradients.squared_norm()
        self.world.cross.drain()
        reduced = self._is_reduced()
        samples = self.totals.samples_summed if reduced else 0
        self._complete = reduced and samples == self._planned
        word = vote_word(
            {
                Vote.COMPLETE: self._complete,
                Vote.GO_ON: not self.stop_requested,
                Vote.QUIET: self.is_quiet(),
            },
            asking_bits(self.world.asking),
        )
        # Inside the replica everyone does the same, whatever became of the reduction across replicas.
        squared, *rows = self.replica.combine_numbers(self._rows_of_replica())
        same_grid = self.maxima.combine(self.replica, self._complete)
        if self._complete:
            self.totals.agree(np.asarray(rows) / self.replica.size)
            self.grad_norm = math.sqrt(squared) * self.gradients.sum.unit
            same = self.totals.same_state(len(self.world.replicas))
            # Before the question whether the sums fit: a value that is not finite fits no exponent.
            self.finite = self.maxima.finite if self.gradients.sum.exact else self._is_finite()
            self._fits = self.maxima.fit or not self.finite
            word |= vote_word({Vote.FINITE: self.finite, Vote.SAME_STATE: same, Vote.IN_RANGE: self._fits})
            # What was reduced with a replica that has drifted must not be committed.
            self._tainted |= not same
        self._places.append((time.time(), "vote"))
        self.world.hooks("vote")
        answer = self.world.agree(int(word))
        agreed = None if answer is None else Vote(answer)
        if agreed is not None and reduced:
            ledger.check_samples(self.index, samples, self._planned)
            ledger.check_grids(self.index, same_grid)
        if agreed is None or Vote.COMPLETE not in agreed:
            return False
        if Vote.SAME_STATE not in agreed:
            return False
        if Vote.IN_RANGE not in agreed:
            # All replicas know it, from the same maxima. Only a complete vote decides this, never a repair: a survivor
            # of the replica with the largest value would choose other exponents than a run without the death.
            self._overflowed = True
            return False
        self.finite = Vote.FINITE in agreed
        self.stop_agreed, self.all_quiet = Vote.GO_ON not in agreed, Vote.QUIET in agreed
        self.asked = agreed.join_asked
        return True

    def _wait_for_device(self) -> None:
        """All microbatches are computed when this returns, and all that they have left to be known is read, at once."""
        losses, seconds = (loss for loss, _ in self._losses), (seconds for seconds, _ in self._computed)
        fetch([self.fingerprint, *losses, *seconds, *self.moving.unread, *self.gradients.unread])
        self._loss = self._weight = 0.0
        for loss, weight in self._losses:
            self._loss += self.gradients.sum.loss(now(loss) * weight)
            self._weight += weight

    @property
    def _codes(self) -> list[int]:
        """Of the largest values in what this rank contributes, one for each kind of value that has an exponent."""
        losses = code_of(now(loss) * weight for loss, weight in self._losses)
        return [code_of([self.gradients.largest]), losses, *(code_of([each]) for each in self.moving.largest)]

    def _is_finite(self) -> bool:
        return self.grad_norm < float("inf") and bool(np.isfinite(self.totals.changes).all())

    @property
    def _pace(self) -> float | None:
        """Seconds per microbatch."""
        ran = sum(count for _, count in self._computed)
        return sum(now(seconds) for seconds, _ in self._computed) / ran if ran else None

    def _rows_of_replica(self) -> list[float]:
        """This rank's part of the squared gradient norm; loss, weight and changes of buffers of its rows."""
        if not self._complete:
            return [0.0] * (3 + self.moving.size)
        return [self._squared_norm, *self.totals.rows_of_replica().tolist()]

    def recover(self) -> bool:
        """After a failed vote. True if the step commits as it is; otherwise `share` says what to run next."""
        noticed = self.world.noticed_at or time.time()
        detect_ms = (time.time() - noticed) * 1e3
        census, lost, evicted = self.repair()
        records = self._read(census)
        try:
            poisoned_sample.check(self.world.notes, self.index, self.world.grid, census.members)
        except poisoned_sample.PoisonedSampleError as error:
            self._all_end(error)
        self._count_fruitless(lost)
        # Where what was left of a sum may pass for it, the dead may have given it up before their end.
        sure = self.world.cross.ends_cleanly or not lost
        if sure and all(record.complete and record.in_range for record in records.values()):
            self._note(census, lost, evicted, noticed, detect_ms, complete=True)
            self.finite = all(record.finite for record in records.values())
            self.stop_agreed, self.all_quiet = any(record.stop for record in records.values()), False
            self.asked = reduce(and_, (record.asked for record in records.values())) > 0
            return True
        started = time.perf_counter()
        decision = self.policy.respond(
            FailureEvent([r.holding for r in records.values()], self.global_batch, self._resting)
        )
        self.share, self._planned = decision.share(self.world.replica), decision.committed
        self.gradients.rewind(overlapped=decision.restore is RestoreMode.NON_BLOCKING)
        self.totals.forget()
        self._complete = self._tainted = False
        if not self.share.kept:
            self.gradients.clear()
            self.moving.clear()
            self._samples.clear()
            self._losses.clear()
        self._done = self.share.kept
        self._note(census, lost, evicted, noticed, detect_ms, complete=False)
        incident = self.incidents[-1]
        incident.boundary, incident.restore = decision.boundary, decision.restore
        incident.extra_microbatches = sum(len(share.run) for share in decision.shares)
        incident.discarded_microbatches = decision.discarded
        incident.restore_ms = (time.perf_counter() - started) * 1e3
        self._places.append((time.time(), "extra"))
        return False

    def _rerun(self) -> None:
        """The sums of a complete attempt were not exact: all replicas run the step again, with larger exponents."""
        self.maxima.rerun()
        self._start_over()
        # As after `begin`: all replicas hold what this layout says, whatever was dealt to them before.
        self._since = self.world.epoch

    def confirm(self, index: int, fingerprint: int | Later[int]) -> tuple[tuple[int, ...], float]:
        """Where no step follows whose vote would tell: whoever holds other parameters than the majority is evicted.

        `fingerprint` is that of the parameters, `index` the step that would follow. Returns the ranks that were lost
        meanwhile, and the seconds of their repairs.
        """
        self.begin(index, fingerprint)
        all_lost, seconds = tuple[int, ...](), 0.0
        while True:
            self.totals.clear()
            self.totals.say(now(fingerprint), self.world.replica)
            self.totals.post(self.world.cross, self.world.epoch)
            self.world.cross.drain()
            reduced = self.totals.reduced_under(self.world.epoch)
            same = reduced and self.totals.same_state(len(self.world.replicas), of_attempt=True)
            if self.world.agree(int(vote_word({Vote.SAME_STATE: same}))) == Vote.SAME_STATE:
                return all_lost, seconds
            self._complete = False
            census, lost, _ = self.repair()
            all_lost, seconds = all_lost + lost, seconds + census.seconds
            self._count_fruitless(lost)
            self.totals.forget()

    def _all_end(self, error: Exception) -> NoReturn:
        """What is known to all survivors alike ends all of them."""
        self.world.linger()
        raise error

    def _count_fruitless(self, lost: tuple[int, ...]) -> None:
        self._fruitless = 0 if lost else self._fruitless + 1
        if self._fruitless > FRUITLESS:
            error = NoCarrierError(
                f"step {self.index}: {self._fruitless} repairs in a row in which nobody was lost; something other "
                "than a death keeps the reductions from ending well (the ranks' logs say what)"
            )
            self._all_end(error)

    def repair(
        self, begin: Callable[[bytes], Census] | None = None
    ) -> tuple[Census, tuple[int, ...], dict[int, str]]:
        """Repair, and evict who has drifted or gone away. The last census, all ranks lost, and why replicas had to go.

        `begin`: how the first repair is entered, with this rank's record, if not like any other.
        """
        self._inquiry.forget()
        census = (begin or self.world.repair)(self._record())
        lost, evicted = census.lost, dict[int, str]()
        while strayed := self._ended(census) or self._drifted(census):
            self._tainted = True
            if not all(strayed.values()):  # nobody goes before all know why
                census = self.world.repair(self._record())
            else:
                self._inquiry.forget()
                evicted |= strayed
                ranks = frozenset(rank for rank in census.members if self.world.grid.replica(rank) in strayed)
                census = self.world.repair(self._record(), evict=ranks, reasons=strayed)
            lost += census.lost
        self._inquiry.forget()
        return census, lost, evicted

    def _is_reduced(self) -> bool:
        sums: list[Bucket | Totals | Maxima] = [*self.gradients.buckets, self.totals, self.maxima]
        return not self._tainted and all(each.reduced_under(self.world.epoch) for each in sums)

    def _record(self) -> bytes:
        if self.arrival is not None:
            return self.arrival.to_bytes()
        finished = self._done - self.share.kept
        record = Record(
            step=self.index,
            complete=self._complete and not self._tainted,
            finite=self.finite,
            in_range=self._complete and self._fits,
            stop=self.stop_requested,
            asked=asking_bits(self.world.asking),
            fingerprint=now(self.fingerprint),
            since=self.seniority.since,
            counts=self.seniority.counts(self.index),
            holding=self.share.holding(finished),
            answer=self._inquiry.answer(),
        )
        return record.to_bytes()

    def _read(self, census: Census) -> Mapping[int, Record]:
        """Those of the members that are in the step."""
        records = {
            rank: Record.from_bytes(data) for rank, data in census.records.items() if not Arrival.is_in(data)
        }
        steps = {record.step for record in records.values()}
        if len(steps) > 1:
            raise AssertionError(f"survivors are in different steps: {sorted(steps)}")
        return records

    def _ended(self, census: Census) -> dict[int, str]:
        """The replicas that are left behind where the scripts of some have ended."""
        behind = self.world.grid.replicas_of(left_behind(census.records, self.world.grid.ranks))
        return dict.fromkeys(behind, "its script and those of the others have ended after different steps")

    def _drifted(self, census: Census) -> dict[int, str]:
        """The replicas whose state is wrong, and why; without reasons while the members still look for them."""
        records = self._read(census)
        verdict = judge(self.world.grid, records)
        answers = {
            replica: (records[here].answer, records[there].answer)
            for replica, (here, there) in verdict.compared.items()
        }
        if answers and self._inquiry.goes_on(answers):
            return dict.fromkeys(answers, "")
        if verdict.states:
            self._all_end(self._diverged(verdict))
        reasons = {replica: found.reason() for replica, found in self._inquiry.found.items()}
        several = self.world.grid.replica_size > 1
        return {
            replica: reasons.get(replica, UNKNOWN) + f" (on rank {here})" * several
            for replica, (here, _) in sorted(verdict.compared.items())
        }

    def _diverged(self, verdict: DriftVerdict) -> StateDivergedError:
        first, *others = map(named, verdict.states)
        told = [
            self._inquiry.found[replicas[0]].between(there, first)
            for replicas, there in zip(verdict.states[1:], others, strict=True)
            if replicas[0] in self._inquiry.found
        ]
        apart = f" ({'; '.join(filter(None, told))})" if any(told) else ""
        return StateDivergedError(
            f"before step {self.index} {' and '.join([first, *others])} hold different states{apart}; {verdict.why}",
            verdict.states,
        )

    def _note(
        self,
        census: Census,
        lost: tuple[int, ...],
        evicted: Mapping[int, str],
        noticed: float,
        detect_ms: float,
        complete: bool,
    ) -> None:
        noticed_in = "advance"
        for since, place in self._places:
            if noticed >= since:
                noticed_in = place
        self.incidents.append(
            met(self.index, self.world.grid, census, lost, evicted, noticed, noticed_in, detect_ms, complete)
        )
