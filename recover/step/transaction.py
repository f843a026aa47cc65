"""One step as a transaction: run a share, reduce, vote; after a death repair and plan again, until
the step commits.

One agreement over the whole world commits a step. Nothing that the optimizer can see changes
before it. The cost of a death is decided from the census alone, so all survivors decide alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import and_
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from recover.gradients import ledger
from recover.gradients.deferred import DeviceValue, fetch, now
from recover.gradients.exponents import LOSSES, ZERO, Codes, code_of, codes_of
from recover.policy import FailureEvent, Policy, RestoreMode, Share, SlotSet
from recover.runs.records.kinds import WRONG_SUM
from recover.step import poisoned_sample
from recover.step.attempt import Attempt
from recover.step.difference import UNKNOWN, Digest, Inquiry
from recover.step.drift import DriftVerdict, judge, named
from recover.step.errors import CorruptGradientError, StateDivergedError
from recover.step.incident import Incident, Losses, incident_of
from recover.step.maxima import Maxima
from recover.step.record import Arrival, Record, arrivals_of
from recover.step.replica_digest import digest_of_replica, limbs_of
from recover.step.seniority import Seniority
from recover.step.sum_check import SumCheck, names_of
from recover.step.sum_check import judge as judge_sums
from recover.step.totals import Totals
from recover.step.verification import Verification
from recover.step.vote import VoteWord, asking_bits, word_of
from recover.world.census import Census, left_behind
from recover.world.commands import Command
from recover.world.membership import NoCarrierError
from recover.world.world import World

if TYPE_CHECKING:  # without torch: the simulated world runs this module, too
    from recover.gradients.buckets import Bucket
    from recover.gradients.module_gradients import Gradients
    from recover.gradients.replica_interface import Replica
    from recover.gradients.running_buffers import RunningBuffers

ATTEMPT = "attempt"  # the command to take part in an attempt
FRUITLESS = 8  # repairs in a row without a death, after which the run ends
# Failed transfers in a row without a death, after which the members go on without a joining replica.
TRIES = 3
NOT_TAKEN = "it joined, and could not take the state that it was given (its log says why)"


class Transaction:
    """The step in progress on this rank. Only its own methods write its fields.

    `begin` starts a step, `attempts` runs it until it commits, `finish` says that its update was
    applied. Every attempt is an `Attempt` of its own.

    is_quiet:  whether no call of `step.on_first` is left to run, as far as this rank knows
    digests:   digests of this rank's state, entry by entry; called after a vote has found different state
    leave_asked:   whether the host of this rank was asked to leave the job
    min_replicas:  if fewer would stay, no replica leaves on notice: all stop
    verification:  slots that two replicas compute; by default none
    sum_check:     compares checksums of sums; by default none
    digest:    128 bits over this rank's parameters before the step, once the fingerprint is read
    tell_attempt:  called on the coordinator of joining ranks before each attempt, with the command to take part in it
    """

    def __init__(
        self,
        world: World,
        gradients: Gradients,
        policy: Policy,
        global_batch: int,
        replica: Replica,
        buffers: RunningBuffers,
        is_quiet: Callable[[], bool] = lambda: True,
        digests: Callable[[], Sequence[Digest]] = tuple,
        leave_asked: Callable[[], bool] = lambda: False,
        min_replicas: int = 1,
        verification: Verification | None = None,
        digest: Callable[[], bytes] = lambda: bytes(16),
        tell_attempt: Callable[[Command], object] = lambda command: None,
        sum_check: SumCheck | None = None,
    ) -> None:
        self.world, self.gradients, self.policy, self.global_batch = world, gradients, policy, global_batch
        self.replica, self.buffers = replica, buffers
        self.index = 0  # number of the step
        self.fingerprint: int | DeviceValue[int] = 0  # of the state with which the step began
        self.incidents: list[Incident] = []
        # Agreed by the last commit, and the same on all replicas.
        self.finite, self.grad_norm = True, 0.0
        self.grad_norms = [0.0]  # of the parts of the gradient that are clipped by themselves
        self.stop_agreed = self.all_quiet = False
        self.asked = False  # all members have seen the same replica ask to join
        self._ready = False  # all joining replicas hold what is handed over in instalments
        self._leaving: frozenset[int] = frozenset()  # replicas that leave before the next step
        self._min_replicas = min_replicas
        replicas = world.replicas if world.outside else tuple(range(world.grid.replicas))
        self.verification, self._sum_check = verification or Verification(), sum_check or SumCheck()
        self.totals = Totals(
            global_batch, replicas, buffers.size, self.verification.planned, self._sum_check.is_on
        )
        self.maxima = Maxima(gradients.sum.exponents)
        self._seniority = Seniority()
        self._inquiry = Inquiry(digests)
        self._is_quiet, self._stop_requested, self._leave_asked = is_quiet, False, leave_asked
        self._digest, self._tell = digest, tell_attempt
        self.parameters_before = ""  # agreed digest of a replica's parameters, before the last committed step
        self._joined: tuple[int, tuple[int, ...]] = 0, ()  # the step before which replicas joined, and which
        # The step that this rank left and has not begun again, and the epoch in which it left.
        self._left: tuple[int, int] | None = None
        self.begin(0, 0)

    @property
    def share(self) -> Share:
        """The slots that this replica runs in the current attempt."""
        return self.attempt.share

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested

    def request_stop(self) -> None:
        """Ask all replicas to stop after this step. Only sets a flag: a signal handler may call
        it."""
        self._stop_requested = True

    @property
    def leaves(self) -> bool:
        """Whether this rank leaves after this step. It first finishes what `step.on_first` runs in the
        background: its successor would have to run that again."""
        return self._leave_asked() and self._is_quiet()

    def compare_all_state(self) -> None:
        """Let the fingerprint of the next vote cover all state, because the state is being saved."""
        self._seniority.compares = True

    def take_join_request(self) -> bool:
        """Whether all members have seen a replica ask to join. True only once for each request:
        a member that leaves the step and begins it again must not enter the admission that the
        others have behind them."""
        asked, self.asked = self.asked, False
        return asked

    @property
    def is_last(self) -> bool:
        """Whether the last commit was the last one of this replica: it leaves, or all stop."""
        return self.stop_agreed or self.world.replica in self._leaving

    def take_ready(self) -> bool:
        """Whether the joining replicas become members now, by the last commit: all members hand them
        the rest of the state. Once, as in `take_join_request`."""
        ready, self._ready = self._ready, False
        return ready and bool(self.world.arrivals)

    def take_leavers(self) -> tuple[int, ...]:
        """Replicas that leave now, by the last commit: all members call `let_leave` with them. Once,
        as in `take_join_request`. A replica that died since is not among them.

        If replicas leave, a request to join waits for the next vote: a replica that joined now could not
        know which replicas have left, and it may be the next one that writes the records.
        """
        leaving, self._leaving = self._leaving, frozenset()
        found = tuple(replica for replica in self.world.replicas if replica in leaving)
        self.asked = self.asked and not found
        return found

    def let_leave(self, leaving: tuple[int, ...]) -> Incident:
        """Go on without these replicas, between two steps: a repair that no death has caused.
        Does not return on their ranks. `begin` must be called before and afterwards.

        All members come here after the same commit, so they have the same set, and no sum of the step
        is under way: nothing is computed again.
        """
        started = time.time()
        grid = self.world.grid
        ranks = frozenset(rank for rank in self.world.members if grid.replica(rank) in leaving)
        census, losses = self.repair(partial(self.world.repair, leave=ranks))
        return incident_of(self.index, grid, census, losses, started)

    def adopt_step(self, index: int) -> None:
        """Set the number of the next step, which a joining rank has read from the state that it received."""
        self.index = index

    def members_joined(self, replicas: tuple[int, ...], as_joining: bool) -> None:
        """Note that these replicas hold the state and are members before this step; `as_joining`: this
        rank is one of them."""
        self._joined = self.index, replicas
        if as_joining:
            self._seniority.join(self.index)
        self.totals.seat(self.world.replicas)

    def leave(self) -> None:
        """Abandon the step on this rank, which will begin it again."""
        self._left = self.index, self.world.epoch

    def finish(self) -> None:
        """Note that the update of the step was applied."""
        self._seniority.found_equal(self.index)
        self.policy.committed(self.totals.paces, self.world.replicas, self.global_batch)

    def evict(self, reasons: Mapping[int, str]) -> Incident:
        """Evict these replicas, for these agreed reasons. All members call this at the beginning of a
        step, and `begin` again afterwards."""
        noticed = time.time()
        self.asked = False  # as in `take_leavers`
        ranks = frozenset(rank for rank in self.world.members if self.world.grid.replica(rank) in reasons)
        census, losses = self.repair(partial(self.world.repair, evict=ranks, reasons=reasons))
        losses = Losses(evicted=reasons) + losses
        return incident_of(self.index, self.world.grid, census, losses, noticed)

    def begin(
        self, index: int, fingerprint: int | DeviceValue[int], incidents: Iterable[Incident] = ()
    ) -> None:
        """Begin step number `index` from a state with this fingerprint; `incidents`: joins
        before it."""
        # Every repair includes all members. After a repair since this rank left, no rank is inside
        # of the step.
        again, left, self._left = (index, self.world.epoch) == self._left, self._left, None
        if not again:
            self._since = self.world.epoch
        self.index, self.fingerprint = index, fingerprint
        # Losses before the step was left are reported when it commits.
        if left is None or left[0] != index:
            self.incidents = []
            self._undecided = Losses()
        self.incidents += incidents
        self._timeline = [(time.time(), "backward")]
        self._fruitless = 0  # repairs in a row that found no rank dead
        if self.gradients.sum.exponents is not None:
            self.gradients.sum.exponents.begin(index)
        # If this replica left the step and a repair has dealt its slots to others meanwhile, the
        # others do not hold what the layout says: this replica must bring nothing, and let the next
        # repair deal to it.
        self._start_over(brings_nothing=again and self._since != self.world.epoch)

    def _start_over(self, brings_nothing: bool = False) -> None:
        """Begin with the layout of a new step: local sums are empty, buffers have their values
        from its beginning."""
        self.gradients.begin()
        self.buffers.begin()
        self.totals.begin(len(self.gradients.parameters))
        resting = self._resting
        busy = [replica for replica in self.world.replicas if replica not in resting]
        self.layout = self.policy.layout(busy, self.global_batch).with_resting(resting)
        share = self.layout.share(self.world.replica)
        self.verification.begin(
            self.index, None if brings_nothing else self.layout, self.world.replica, resting
        )
        if brings_nothing:
            share = replace(share, run=SlotSet())
        self.attempt = Attempt(share, self.layout.committed)

    @property
    def _resting(self) -> tuple[int, ...]:
        """Replicas that joined before this step and run none of its microbatches, as long as others
        do.

        The user's code before the loop over microbatches ran on them at step 0, before they had
        the state of the others: what it has drawn or computed for the loop differs from the
        others.
        """
        since, joined = self._joined
        resting = [replica for replica in self.world.replicas if since == self.index and replica in joined]
        return tuple(resting) if len(resting) < len(self.world.replicas) else ()

    def attempts(
        self, cut: Callable[[list[int]], list[list[int]]], overlap: bool, given_up: Callable[[], None]
    ) -> Iterator[tuple[list[int], str, bool]]:
        """Yields, until the step commits: slots to run, their place for fault schedules, and whether
        buckets are posted meanwhile. The place `check` is that of slots that do not enter the local
        sums: their gradients are only compared.

        cut:       cuts the slots of a share into pieces, each of them run at once
        overlap:   buckets are posted while the last piece runs, otherwise after it
        given_up:  called when what this replica has run does not enter the step
        """
        place = "forward"
        while True:
            started = time.perf_counter()
            self._tell_attempt()
            if place == "forward":
                for slot in self.verification.slots_to_check():
                    yield [slot], "check", False
            pieces = self._pieces(cut, overlap)
            for piece in pieces:
                yield piece, place, overlap and piece is pieces[-1]
            if not (pieces and overlap):
                self.gradients.post_all(self.post)
            committed = self.vote()
            if place == "extra":  # the first attempt after a join, or a loss before the step, repeats nothing
                self.incidents[-1].redo_ms = (time.perf_counter() - started) * 1e3
            if self.attempt.overflowed:
                self._rerun()
                given_up()
                place = "forward"
                continue
            committed = committed or self.recover()
            while self.verification.is_pending:
                for slot in self.verification.slots_to_repeat():
                    yield [slot], "check", False
                committed = self._vote_on_checks() or self.recover()
            if committed:
                return
            if not self.share.kept:
                given_up()
            place = "extra"

    def _tell_attempt(self) -> None:
        """Let joining ranks take part in this attempt, without contributing. Called before any slot is
        run: the part of the state that they are given travels while the microbatches are computed."""
        world = self.world
        if world.arrivals and world.rank == world.coordinator:
            self._tell(
                {
                    "do": ATTEMPT,
                    "step": self.index,
                    "votes": world.board.votes(world.rank),
                    "totals": self.totals.length,
                    "maxima": self.maxima.length,
                }
            )

    def _pieces(self, cut: Callable[[list[int]], list[list[int]]], overlap: bool) -> list[list[int]]:
        """The share in pieces that run at once. In a round, the gradient of one microbatch cannot be
        told from that of the next: a verified slot is a round of its own."""
        slots = list(self.share.run)
        alone = [] if overlap else [slot for slot in slots if self.verification.is_checked(slot)]
        return cut([slot for slot in slots if slot not in alone]) + [[slot] for slot in alone]

    def _vote_on_checks(self) -> bool:
        """After some replicas have computed slots again: all members enter a vote that always fails, and
        then a repair, whose census carries the results."""
        fetch(self.verification.unread)
        self.world.board.come_to_vote(self.world.rank)
        self.world.hooks("vote")
        self.world.agree(int(word_of({})))
        return False

    def post(self, index: int, bucket: Bucket) -> None:
        """Start the reduction of a full bucket. Errors show at the vote, never here."""
        if index == 0:
            self._timeline.append((time.time(), "in-reduce"))
        self.world.hooks("bucket", index)
        work = bucket.post(self.world.cross, self.world.epoch, self.share.counts)
        self.world.hooks.under_way("in-reduce", work, index)

    def vote(self) -> bool:
        """All slots are run and all buckets are posted: vote. True if the step commits; the same
        on all survivors."""
        attempt = self.attempt
        ledger.check_buckets(self.index, self.gradients.buckets, attempt.share.kept | attempt.share.run)
        loss, weight = self._read_device()
        self.world.board.come_to_vote(self.world.rank)
        self._post_totals(loss, weight)
        squared_norms = self.gradients.squared_norms()
        # Drained before the word is made: a reduction that is still running could fail after this rank
        # called it complete.
        self.world.cross.drain()
        reduced = self._is_reduced()
        if reduced and self._sum_check.is_on:
            self.world.hooks("reduced")
        samples = self.totals.samples_summed if reduced else 0
        attempt.complete = reduced and samples == attempt.planned
        word = word_of(
            {
                VoteWord.COMPLETE: attempt.complete,
                VoteWord.GO_ON: not self._stop_requested,
                VoteWord.QUIET: self._is_quiet(),
                VoteWord.READY: True,
            },
            self._asking,
        )
        # All ranks of the replica take part, whether the reduction across replicas succeeded or not: a
        # rank that left this out would leave its peers blocked.
        limbs = limbs_of(self._digest(), self.world.shard)
        combined = self.replica.combine_numbers([*limbs, *self._rows_of_replica(squared_norms)])
        limbs, combined = combined[: len(limbs)], combined[len(limbs) :]
        squared_norms, rows = combined[: len(squared_norms)], combined[len(squared_norms) :]
        same_grid = self.maxima.combine(self.replica, attempt.complete)
        if attempt.complete:
            self.totals.agree(np.asarray(rows) / self.replica.size)
            self.parameters_before = digest_of_replica(limbs)
            self.grad_norm = math.sqrt(sum(squared_norms))
            self.grad_norms = [math.sqrt(squared) for squared in squared_norms]
            word |= self._judge_sum()
        self._timeline.append((time.time(), "vote"))
        self.world.hooks("vote")
        answer = self.world.agree(int(word))
        agreed = None if answer is None else VoteWord(answer)
        if agreed is not None and reduced:
            ledger.check_samples(self.index, samples, attempt.planned)
            ledger.check_grids(self.index, same_grid)
        if agreed is None or VoteWord.COMPLETE not in agreed:
            return False
        if VoteWord.SAME_STATE not in agreed:
            return False
        if VoteWord.IN_RANGE not in agreed:
            # All replicas know this from the same maxima. Only a complete vote decides this, never a
            # repair: survivors of the replica with the largest value would choose other exponents
            # than a run without the death.
            attempt.overflowed = True
            return False
        self.finite = VoteWord.FINITE in agreed
        self.stop_agreed, self.all_quiet = VoteWord.GO_ON not in agreed, VoteWord.QUIET in agreed
        self.asked, self._ready = agreed.join_asked, VoteWord.READY in agreed
        self._decide_who_leaves(self.totals.leaving)
        return True

    @property
    def _asking(self) -> int:
        """Replicas that this rank sees asking to join, as bits. While others join, they have to wait."""
        return 0 if self.world.arrivals else asking_bits(self.world.asking)

    def _decide_who_leaves(self, asked: set[int]) -> None:
        """Decide at a commit which replicas leave, from what all members know alike. If too few replicas
        would stay, none leaves: all stop after this step, and can save it."""
        leaving = asked.intersection(self.world.replicas)
        if leaving and len(self.world.replicas) - len(leaving) < max(1, self._min_replicas):
            leaving, self.stop_agreed = set(), True
        self._leaving = frozenset(leaving)

    def _read_device(self) -> tuple[float, float]:
        """Wait until all microbatches are computed, and read all values that they left on the
        device in one transfer. Returns the sums of losses and weights."""
        attempt = self.attempt
        unread = [*attempt.unread, *self.verification.unread, *self._sum_check.read()]
        fetch([self.fingerprint, *unread, *self.buffers.unread, *self.gradients.unread])
        loss = 0.0
        for value in attempt.weighted_losses:
            loss += self.gradients.sum.loss(value)
        return loss, attempt.total_weight

    def _post_totals(self, loss: float, weight: float) -> None:
        """Start the reduction of the small numbers, and of the maxima."""
        attempt = self.attempt
        self.totals.clear()
        if attempt.share.counts:
            self.totals.contribute(
                loss,
                weight,
                attempt.samples,
                self.buffers.changes,
                self.gradients.usage,
                attempt.not_finite,
                attempt.contents,
            )
            if self._sum_check.is_on:
                self.totals.say_checksum(self._sum_check.added)
        self.totals.say(now(self.fingerprint), self.world.replica, attempt.pace, self.leaves)
        if self.verification.is_on:
            self.totals.say_checks(*self.verification.said(attempt.samples))
        work = self.totals.post(self.world.cross, self.world.epoch)
        self.maxima.post(self.world.cross, self.world.epoch, self._codes)
        self.world.hooks.under_way("in-totals", work)

    def _judge_sum(self) -> VoteWord:
        """The bits of the vote that need a complete sum."""
        attempt = self.attempt
        same = self.totals.same_state(len(self.world.replicas))
        if self.verification.is_on:
            same &= self.verification.compare(self.totals.checked(), self.totals.same_start())
        # Decided before the question whether the sums fit: a value that is not finite fits no exponent.
        attempt.finite = self.maxima.finite if self.gradients.sum.exact else self._is_finite()
        attempt.in_range = self.maxima.fit or not attempt.finite
        same &= self._check_sums()
        # A sum with a replica whose state differs, or with a gradient that another replica does not
        # reproduce, must not be committed, even if that replica dies before the repair; nor must a
        # wrong sum.
        attempt.tainted |= not same
        return word_of(
            {VoteWord.FINITE: attempt.finite, VoteWord.SAME_STATE: same, VoteWord.IN_RANGE: attempt.in_range}
        )

    def _check_sums(self) -> bool:
        """Whether the reduced sums of this rank have the checksum of all that was added to them.

        They are compared only if no value was too large: sums that overflow, or hold a NaN, are no sums
        of integers. The former are computed again, and the latter never reach the optimizer.
        """
        attempt, check = self.attempt, self._sum_check
        if not check.is_on or not (attempt.finite and attempt.in_range):
            return True
        attempt.has_wrong_sums = not check.result_is_right(self.totals.checksum)
        attempt.damaged = attempt.has_wrong_sums and attempt.share.counts and not check.local_is_right()
        return not attempt.has_wrong_sums

    @property
    def _codes(self) -> Codes | None:
        """Codes of the largest values that this rank contributes, one for each kind of value
        with an exponent; None without exponents, or if it contributes nothing."""
        exponents = self.gradients.sum.exponents
        if exponents is None or not self.attempt.share.counts:
            return None
        codes = np.full(exponents.size, ZERO, np.int32)
        gradients, buffers = codes_of(self.gradients.largest), codes_of(self.buffers.largest)
        codes[: len(gradients)] = gradients
        codes[LOSSES] = code_of(self.attempt.weighted_losses)
        codes[len(codes) - len(buffers) :] = buffers
        return codes

    def _is_finite(self) -> bool:
        return self.grad_norm < float("inf") and bool(np.isfinite(self.totals.changes).all())

    def _rows_of_replica(self, squared_norms: list[float]) -> list[float]:
        """This rank's part of the squared gradient norms, and `Totals.rows_of_replica`."""
        if not self.attempt.complete:
            return [0.0] * (len(squared_norms) + self.totals.number_of_rows)
        return [*squared_norms, *self.totals.rows_of_replica().tolist()]

    def recover(self) -> bool:
        """Repair after a failed vote. True if the step commits unchanged; otherwise `attempt` is
        the next attempt."""
        noticed = self.world.noticed_at or time.time()
        detect_ms = (time.time() - noticed) * 1e3
        census, losses = self.repair()
        records = self._read(census)
        try:
            poisoned_sample.check(self.world.notes, self.index, self.world.grid, census.members)
        except poisoned_sample.PoisonedSampleError as error:
            self._all_end(error)
        self._count_fruitless(losses)
        losses, self._undecided = self._undecided + losses, Losses()
        if self.verification.is_pending:  # one incident reports all losses until it is decided
            self._undecided = losses
            return False
        # With a carrier whose aborted sum looks like a finished one, a rank that died, or left while it
        # joined, may have aborted before: then even a sum that all others take for complete is not trusted.
        sure = self.world.cross.ends_cleanly or not losses
        # A joining replica that lives must hold the sum, too: it applies the same update.
        takers = arrivals_of(census.records).values()
        sure = sure and all(taker.complete for taker in takers)
        if sure and all(record.complete and record.in_range for record in records.values()):
            self._note(census, losses, noticed, detect_ms, complete=True)
            self.finite = all(record.finite for record in records.values())
            self.stop_agreed, self.all_quiet = any(record.stop for record in records.values()), False
            self.asked = reduce(and_, (record.asked for record in records.values())) > 0
            self._ready = all(taker.ready for taker in takers)
            grid = self.world.grid
            self._decide_who_leaves({grid.replica(rank) for rank, record in records.items() if record.leaves})
            return True
        started = time.perf_counter()
        decision = self.policy.respond(
            FailureEvent([r.holding for r in records.values()], self.global_batch, self._resting)
        )
        self.attempt = self.attempt.following(decision.share(self.world.replica), decision.committed)
        self.gradients.rewind(overlapped=decision.restore is RestoreMode.NON_BLOCKING)
        self.totals.forget()
        if not self.share.kept:
            self.gradients.clear()
            self.buffers.clear()
        self._note(census, losses, noticed, detect_ms, complete=False)
        incident = self.incidents[-1]
        incident.boundary, incident.restore = decision.boundary, decision.restore
        incident.extra_microbatches = sum(len(share.run) for share in decision.shares)
        incident.discarded_microbatches = decision.discarded
        incident.restore_ms = (time.perf_counter() - started) * 1e3
        self._timeline.append((time.time(), "extra"))
        return False

    def _rerun(self) -> None:
        """The sums of a complete attempt were not exact: all replicas run the step again, with
        larger exponents."""
        self.maxima.rerun()
        self._start_over()
        # As after `begin`: all replicas hold what this layout says, whatever was dealt to them
        # before.
        self._since = self.world.epoch

    def confirm(self, index: int, fingerprint: int | DeviceValue[int]) -> tuple[tuple[int, ...], float]:
        """After the last step: compare the state over all replicas, and evict those that differ
        from the majority.

        `fingerprint` is that of the state, `index` the step that would follow. Returns the ranks
        that were lost meanwhile, and the seconds of their repairs.
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
            if self.world.agree(int(word_of({VoteWord.SAME_STATE: same}))) == VoteWord.SAME_STATE:
                self._seniority.found_equal(index)
                return all_lost, seconds
            census, losses = self.repair()
            all_lost, seconds = all_lost + losses.lost, seconds + census.seconds
            self._count_fruitless(losses)
            self.totals.forget()

    def _all_end(self, error: Exception) -> NoReturn:
        """Raise an error that all survivors raise alike, once all of them have the results from which it
        follows: a rank that ended at once would look like one more death to the others."""
        self.world.linger()
        raise error

    def _count_fruitless(self, losses: Losses) -> None:
        self._fruitless = 0 if losses else self._fruitless + 1
        if self._fruitless > FRUITLESS:
            error = NoCarrierError(
                f"step {self.index}: {self._fruitless} repairs in a row in which nobody was lost; something other "
                "than a death keeps the reductions from ending well (the ranks' logs say what)"
            )
            self._all_end(error)

    def repair(self, begin: Callable[[bytes], Census] | None = None) -> tuple[Census, Losses]:
        """Repair, and evict replicas whose state differs, whose scripts have ended or whose gradients
        are wrong.

        Returns the last census, and all losses.

        begin:  how the first repair is entered with this rank's record, by default `world.repair`
        """
        self._inquiry.forget()
        census = (begin or self.world.repair)(self._record())
        losses = Losses.of(census)
        while strayed := (
            self._ended(census)
            or self._drifted(census)
            or self._miscomputed(census)
            or self._missummed(census)
            or self._not_taking(census)
        ):
            self.attempt.tainted = True
            if not all(strayed.values()):  # no replica is evicted before all members know the reason
                census = self.world.repair(self._record())
            else:
                self._inquiry.forget()
                losses += Losses(evicted=strayed)
                ranks = frozenset(rank for rank in census.members if self.world.grid.replica(rank) in strayed)
                census = self.world.repair(self._record(), evict=ranks, reasons=strayed)
            losses += Losses.of(census)
        self._inquiry.forget()
        return census, losses

    def _is_reduced(self) -> bool:
        sums: list[Bucket | Totals | Maxima] = [*self.gradients.buckets, self.totals, self.maxima]
        return not self.attempt.tainted and all(each.reduced_under(self.world.epoch) for each in sums)

    def _record(self) -> bytes:
        attempt = self.attempt
        record = Record(
            step=self.index,
            complete=attempt.complete and not attempt.tainted,
            finite=attempt.finite,
            in_range=attempt.in_range,
            stop=self._stop_requested,
            leaves=self.leaves,
            asked=self._asking,
            fingerprint=now(self.fingerprint),
            since=self._seniority.since,
            counts=self._seniority.counts(self.index),
            wrong_sums=attempt.wrong_sums,
            damaged=attempt.damaged,
            holding=attempt.holding,
            answer=self._inquiry.answer(),
            evidence=self.verification.evidence(),
        )
        return record.to_bytes()

    def _read(self, census: Census) -> Mapping[int, Record]:
        """Records of the members that are in the step."""
        records = {
            rank: Record.from_bytes(data) for rank, data in census.records.items() if not Arrival.is_in(data)
        }
        steps = {record.step for record in records.values()}
        if len(steps) > 1:
            raise AssertionError(f"survivors are in different steps: {sorted(steps)}")
        return records

    def _ended(self, census: Census) -> dict[int, str]:
        """Replicas to evict because the scripts of some members have ended and those of others
        have not."""
        behind = self.world.grid.replicas_of(left_behind(census.records, self.world.grid.ranks))
        return dict.fromkeys(behind, "its script and those of the others have ended after different steps")

    def _not_taking(self, census: Census) -> dict[int, str]:
        """Joining replicas to evict: the state does not arrive there, although no rank dies."""
        failing = [rank for rank, each in arrivals_of(census.records).items() if each.failures >= TRIES]
        return {} if census.lost else dict.fromkeys(self.world.grid.replicas_of(failing), NOT_TAKEN)

    def _drifted(self, census: Census) -> dict[int, str]:
        """Replicas with a wrong state, and the reasons; empty reasons while the members are
        still looking for them."""
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

    def _miscomputed(self, census: Census) -> dict[int, str]:
        """Replicas to evict because they computed a wrong gradient. Slots that must be computed
        again first are left in `verification`."""
        verification = self.verification
        if not verification.is_on:
            return {}
        records = self._read(census)
        verdict = verification.decide(
            self.world.grid, {rank: record.evidence for rank, record in records.items()}
        )
        if verdict.recompute:
            self.attempt.tainted = True
        if verdict.error:
            self._all_end(CorruptGradientError(f"step {self.index}: {verdict.error}"))
        return {
            replica: f"{why}; {verification.since_passed(replica)}"
            for replica, why in verdict.evicted.items()
        }

    def _missummed(self, census: Census) -> dict[int, str]:
        """Replicas to evict because their sums are wrong. If there is none, the wrong sums are reduced
        again: the ranks that hold them do not call them complete."""
        verdict = judge_sums(self.world.grid, self._read(census))
        if verdict.error:
            self._all_end(CorruptGradientError(f"step {self.index}: {verdict.error}"))
        return dict(verdict.evicted)

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
        losses: Losses,
        noticed: float,
        detect_ms: float,
        complete: bool,
    ) -> None:
        noticed_in = "advance"
        for since, place in self._timeline:
            if noticed >= since:
                noticed_in = place
        incident = incident_of(
            self.index, self.world.grid, census, losses, noticed, noticed_in, detect_ms, complete
        )
        # Sums that a replica has made wrong are wrong on others, too: its eviction already reports them.
        if not any(why.startswith(WRONG_SUM) for why in losses.evicted.values()):
            records = self._read(census)
            wrong = [rank for rank, record in records.items() if record.wrong_sums]
            incident.wrong_sums = tuple(names_of(wrong, records))
        self.incidents.append(incident)
