"""The parts of one `recover.Step`, and the order in which its parts act in a step. Internal:
users see `Step`."""

from __future__ import annotations

import socket
import warnings
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import torch

from recover.gradients.deferred import DeviceValue
from recover.gradients.module_gradients import Gradients, OwnedGradients, Post
from recover.gradients.optimizers import optimizers_of
from recover.gradients.reduction import Bits, Reduction, make_sum
from recover.gradients.replica_interface import replica_of
from recover.gradients.running_buffers import RunningBuffers
from recover.job.leave_request import LeaveRequest
from recover.job.script_replay import ScriptReplay
from recover.job.stop_request import StopRequest
from recover.policy import SlotSet, get_policy
from recover.step.checked_microbatch import CheckedMicrobatch
from recover.step.clipping import Clip, Clipping
from recover.step.compared_state import ComparedState
from recover.step.errors import StateDivergedError
from recover.step.extra_comparison import ExtraComparison
from recover.step.in_flight import MicrobatchesInFlight, Stream, T
from recover.step.incident import Incident
from recover.step.initial_state import copy_state_from_first_replica
from recover.step.joining.extra import Extra
from recover.step.joining.instalments import TrainedState
from recover.step.joining.joinable import Joinable
from recover.step.joining.state_handover import JoinWay, StateHandover
from recover.step.loop.clock import clock_of
from recover.step.loop.early_leaves import EarlyLeaves
from recover.step.loop.habits import Habits
from recover.step.loop.stragglers import StragglerEviction, Stragglers
from recover.step.loop.weights import (
    Weight,
    losses_of,
    refuse_earlier_gradients,
    refuse_other_backwards,
    weighted,
    weights_of,
)
from recover.step.model_checks import ModelAndOptimizer
from recover.step.on_first import OnFirst
from recover.step.position import Position, refuse_other_size
from recover.step.randomness import Randomness
from recover.step.result import StepResult, result_of
from recover.step.samples import SampleMode, sample_mode
from recover.step.skipped import SkippedSteps
from recover.step.sum_check import SumCheck
from recover.step.transaction import Transaction
from recover.step.verification import Verification
from recover.world import rank_exit
from recover.world.calls import Call
from recover.world.world import World

Run = Generator[list[Any], None, None]


class StepEngine:
    """The parts of a step, and `run`: one step from its beginning to its commit.

    records:      creates the records of this step (`recover.runs.writing.script_records.records_of`)
    save_states:  called when replicas hold different states and no majority can tell which is right
    """

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        optimizer: Any,
        global_batch: int,
        *,
        policy: str,
        samples: SampleMode,
        clip: Clip,
        scheduler: Any,
        seed: int,
        reduction: Reduction,
        reduction_bits: Bits,
        bucket_mb: float | None,
        gradients: Gradients | None,
        buffers: Iterable[str],
        extra: dict[str, Extra],
        skip_limit: int | None,
        min_replicas: int,
        verify: int,
        evict_stragglers: StragglerEviction | None,
        join: JoinWay,
        records: Callable[[], Any],
        save_states: Callable[[StateDivergedError], None],
    ) -> None:
        replica = replica_of(model)
        self.replay = ScriptReplay.from_json(world.job.replay)
        if self.replay is not None:
            self.replay.refuse_other_batch(global_batch)
        self.world, self.model, self.scheduler, self.replica = world, model, scheduler, replica
        self.exact_sum = reduction == "reproducible"
        self._optimizers, self._clipping = optimizers_of(optimizer), Clipping(clip, optimizer)
        self.result = StepResult()  # of the last committed step
        self._save_states = save_states
        if self._clipping.by_group and not replica.peers_hold_all_buffers:
            raise ValueError(
                "clip has one entry for each parameter group, and the ranks of a replica of recover.threed hold "
                "different parameters, so their groups cannot be matched; give clip one number"
            )
        self._checks = ModelAndOptimizer(model, optimizer, gradients, self._clipping.by_group)
        refuse_other_size(world, model)
        world.steps_made += 1
        world.board.make_step(world.rank)
        self._randomness = Randomness(seed, world.shard)
        replica.seed_with(self.seed_microbatch)
        self._samples = sample_mode(samples, policy, global_batch, world.replica, world.grid.replicas)
        self.gradients = gradients or OwnedGradients(
            model.parameters(),
            bucket_mb,
            make_sum(reduction, global_batch, reduction_bits),
            replica,
            self._checks.names,
            self._clipping.parts,
            self._clipping.part_of,
            bool(verify),
        )
        exponents = self.gradients.sum.exponents
        self._habits = Habits(model, optimizer)
        self.buffers = RunningBuffers(model, buffers, self.gradients.sum, replica, not gradients)
        self.on_first = OnFirst(world, self._randomness)
        self.compared = ComparedState(
            self._checks, optimizer, self.buffers, scheduler, lambda: extra, exponents
        )
        self._leave_request = LeaveRequest(world.job.session)
        rules = get_policy(policy, world.grid.replicas, replica.fill)
        self.transaction = Transaction(
            world,
            self.gradients,
            rules,
            global_batch,
            replica,
            self.buffers,
            self.on_first.is_quiet,
            self.compared.digests,
            lambda: self._leave_request.is_asked,
            min_replicas,
            Verification(verify, seed, not world.outside, world.job.host or socket.gethostname()),
            lambda: self.compared.parameters_digest,
            lambda command: self.handover.giver.give(command),
            self._sum_check(verify),
        )
        self._checked = CheckedMicrobatch(self.transaction.verification, self.gradients, world.hooks)
        self.stop_request = StopRequest(world.job.session)
        self.position = Position(
            global_batch, self._samples, Stragglers(rank_exit.log, evict_stragglers), rules, exponents
        )
        self._in_flight = MicrobatchesInFlight(
            world, self._samples, self._randomness, clock_of(self.gradients.parameters[0].device)
        )
        self.extra_comparison, self.records = ExtraComparison(world), records()
        self._skipped, self._leaves = SkippedSteps(world, skip_limit), EarlyLeaves()
        ours: dict[str, Extra] = {
            "recover.skipped": self._skipped,
            "recover.runs.records": self.records,
            "recover.compared": self.extra_comparison,
            "recover.verification": self.transaction.verification,
        }
        state = model, optimizer, scheduler, ChainMap[str, Extra](extra, ours)
        self.joinable = Joinable(world, state, extra)
        self.handover = StateHandover(
            world,
            self.transaction,
            self.position,
            state,
            self.on_first.take_over,
            self.joinable,
            TrainedState(model, optimizer, self.gradients, lambda: self.buffers.names, self._step_optimizers),
            join,
        )
        self._run: Run | None = None  # the step in progress, or the last one
        self._by_rounds = False
        # Of the microbatch or round that was handed out last: whether its buckets are posted, and its slots.
        self._posts, self._expected = False, SlotSet()
        self._compares_all = False  # the next vote compares all state, not only parameters and settings
        self._joinable_checks = 2
        if not world.outside:
            if (idle := world.grid.replicas - global_batch) > 0:
                rank_exit.report(
                    f"global_batch={global_batch} is less than the {world.grid.replicas} replicas, so {idle} of them "
                    "compute nothing; raise global_batch, or start fewer replicas",
                    world.rank == min(world.members),
                )
            copy_state_from_first_replica(world, model)
        world.hooks.watch(model, self.gradients)
        rank_exit.on_raise(self._in_flight.blame)
        rank_exit.on_success(self._end)

    def _sum_check(self, verify: int) -> SumCheck:
        """Sums are checked if gradients are, and if they are exact."""
        if not verify or not self.exact_sum:
            return SumCheck()
        assert isinstance(self.gradients, OwnedGradients)  # `Step` refuses others
        return SumCheck(self.gradients)

    @property
    def is_inside_step(self) -> bool:
        return self._run is not None and getgeneratorstate(self._run) != GEN_CLOSED

    def is_current(self, run: Run) -> bool:
        return self._run is run

    def start(self, stream: Stream[T], by_rounds: bool) -> Generator[list[T], None, None]:
        """Begin a step. A step that is still in progress is left: only the newest iterator
        continues."""
        self.on_first.take_over()
        if self._run is not None:
            self._run.close()
        if self.replay is not None and self.position.index >= self.replay.until:
            raise SystemExit(0)  # all that was asked for: the script ends here, on all ranks
        self._leaves.refuse_another(self.position.index + 1)
        run = self._run = self.run(stream, by_rounds)
        return run

    def run(self, stream: Stream[T], by_rounds: bool) -> Generator[list[T], None, None]:
        """One step: yields microbatches to compute, and has committed when it is exhausted.

        Closing it leaves the step: nothing is committed, and this replica begins the same step
        again next time.
        """
        joins: list[Incident] = []
        if self.world.outside:
            yield from self._rehearse(stream, by_rounds)
            joins = self.handover.join()
        number = self.position.index + 1
        self.position.refuse_torn()
        self._prepare(number, by_rounds, joined=bool(joins))
        with self.records, self.world.step(number), self._randomness.apart():
            try:
                self._begin(number, joins)
                cut = self._cut_and_announce(stream, by_rounds)
                for slots, place, post in self.transaction.attempts(
                    cut, not by_rounds, self._samples.put_back
                ):
                    self._checked.hand_out(slots, place)
                    yield self._hand_out(stream, slots, place, post)
                    if place != "extra":  # the time of extra ones is recorded with the incident
                        self.records.next_microbatch()
                    if self._in_flight.pending:
                        other = self.gradients.have_arrived and not by_rounds
                        raise RuntimeError(
                            "the microbatch was not followed by step.backward(loss); call it for each one"
                            + (", instead of loss.backward(), which was called" if other else "")
                        )
                    self.buffers.refuse_later_changes()
                    if self.stop_request.is_asked:
                        self.transaction.request_stop()
            except GeneratorExit:
                # Left by a `break`, or by an exception outside of a microbatch: this rank may leave
                # the job without being blamed. With a microbatch pending, the microbatch may be the
                # cause.
                is_inside = bool(self._in_flight.pending)
                if not is_inside:
                    rank_exit.in_step(False)
                self._leaves.left(number, len(self.transaction.attempt.samples), is_inside)
                self._leave()
                # Level 4: `MicrobatchLoop.close` and `__del__` are between this frame and the
                # user's.
                warnings.warn(
                    f"step {number} was left before it was complete: nothing was committed; let the loop over "
                    "step.microbatches run to its end (leave a `break` out)",
                    stacklevel=4,
                )
                raise
            except StateDivergedError as error:
                self._leave()
                self._save_states(error)
                raise
            except BaseException:
                self._leave()
                raise
            with self.position.applying():
                self._commit(number)
        # Called outside of the step, which is committed and recorded: if it raises, all replicas end.
        self._skipped.refuse_too_many(number)

    def backward(self, loss: torch.Tensor, weight: Weight) -> None:
        """Backward of the microbatch (or round) that was handed out last; see `Step.backward`."""
        pending = self._in_flight.pending
        if not pending:
            raise RuntimeError(
                "step.backward was called without a microbatch; call it once for each one handed out"
            )
        transaction = self.transaction
        ran_with = self.replica.weights_of_round()
        weights = weights_of(weight, ran_with, loss, len(pending), self.exact_sum)
        refuse_other_backwards(loss, self.gradients.have_arrived, self._by_rounds)
        self.world.hooks("backward")
        if self._checked.counts:
            self.buffers.take()
        self.gradients.ready()
        with self._habits.backward(loss, (transaction.global_batch, len(transaction.share.run))):
            if loss.requires_grad:
                weighted(loss, weights).backward()
        self.gradients.collect()
        self._finish(loss, weights)

    @contextmanager
    def own_backward(self, weight: Weight) -> Iterator[Callable[..., None]]:
        """Around the forward and backward passes that the caller runs; see `Step.own_backward`."""
        if len(self._in_flight.pending) != 1 or self._by_rounds:
            raise RuntimeError(
                f"step.own_backward was called with {len(self._in_flight.pending)} microbatch(es) in flight, in "
                f"step.{'rounds' if self._by_rounds else 'microbatches'}; call it once for each microbatch of "
                "step.microbatches (after a round, step.backward records what its pipeline has run)"
            )
        if not isinstance(self.gradients, OwnedGradients):
            raise ValueError(
                f"step.own_backward was called with gradients={type(self.gradients).__name__}, which counts one "
                "backward for each microbatch; give Step the plain module, without gradients="
            )
        refuse_earlier_gradients(self.gradients.have_arrived, "step.own_backward")
        gradients, recorded, overlaps = self.gradients, list[torch.Tensor](), False

        def record(loss: torch.Tensor, before_last_pass: bool = False) -> None:
            nonlocal overlaps
            recorded.append(loss.detach())
            if before_last_pass:
                overlaps = True
                gradients.expect_last_pass(self._post_of_this, self._expected)

        self.world.hooks("backward")
        # The caller may run several passes, and drop the gradients of some: pipelines of torch 2.15 probe their
        # stages with a real backward pass. The gradients that it leaves in `.grad` count.
        self.gradients.pause()
        yield record
        if len(recorded) != 1:
            raise RuntimeError(
                f"step.own_backward has recorded {len(recorded)} losses of one microbatch; call the function that it "
                "yields once, with the loss: `with step.own_backward(weight) as record: ...; record(loss)`"
            )
        weights = weights_of(weight, None, recorded[0], 1, self.exact_sum)
        if self._checked.counts:
            self.buffers.take()
        if not overlaps:
            self.gradients.expect(self._post_of_this, self._expected)
        self.gradients.collect()
        self._finish(recorded[0], weights)

    @property
    def _post_of_this(self) -> Post | None:
        """The callback that posts the buckets of the microbatch in flight; None if more microbatches
        follow in this attempt."""
        return self.transaction.post if self._posts else None

    def _finish(self, loss: torch.Tensor, weights: list[float]) -> None:
        """Note that the gradients of what is in flight are in the local sums."""
        pending, transaction = self._in_flight.pending, self.transaction
        self._checked.computed(loss, weights)
        losses, sums = losses_of(loss, len(pending)), self._in_flight.checksums
        if self._checked.counts:
            for (slot, sample), value, each, contents in zip(pending, losses, weights, sums, strict=True):
                transaction.attempt.finish_slot(slot, sample, value, each, contents)
        self.world.hooks.computed(self._in_flight.seconds)
        took = self._in_flight.computed()
        transaction.attempt.computed(took, len(pending) + self.replica.fill)
        if not isinstance(took, DeviceValue):  # a device may compute while the script goes on
            self.records.backward_done()

    def seed_microbatch(self, number: int, stage: int = 0) -> None:
        """Seed the generators for microbatch `number` of the round in flight; see
        `Step.seed_microbatch`."""
        self._in_flight.seed(number, stage)

    def compare_all_state(self) -> None:
        """Let the next vote compare all state, because it is being saved."""
        self._compares_all = True
        self.transaction.compare_all_state()

    def confirm(self) -> tuple[tuple[int, ...], float]:
        """Compare all state over the replicas after the last step; see `Step.confirm`."""
        met: list[tuple[tuple[int, ...], float]] = []
        with self.world.call(Call.CONFIRM, lambda *lost: met.append(lost)):
            self.compare_all_state()
            number = self.position.index + 1
            self.replica.reshard()
            rank_exit.in_step(True)  # all replicas raise the same error here: no rank is to blame
            try:
                met.append(self.transaction.confirm(number, self._fingerprint(number, full=True)))
            except StateDivergedError as error:
                self._save_states(error)
                raise
            rank_exit.in_step(False)
        return tuple(rank for ranks, _ in met for rank in ranks), sum(seconds for _, seconds in met)

    def _cut_and_announce(self, stream: Stream[T], by_rounds: bool) -> Callable[[list[int]], list[list[int]]]:
        """A function that cuts a share into microbatches, or makes one round of it, after announcing it
        to the stream."""

        def cut(slots: list[int]) -> list[list[int]]:
            self._in_flight.announce(stream, slots)
            if by_rounds:
                return [slots] if slots else []
            return [[slot] for slot in slots]

        return cut

    def _prepare(self, number: int, by_rounds: bool, joined: bool) -> None:
        """Checks before this rank owes the others anything: they may raise without costing a replica."""
        self._by_rounds = by_rounds
        self.world.hooks.step = number
        if self._joinable_checks:  # before the first step, and once the optimizer has created its state
            self._joinable_checks -= 1
            self.joinable.report()
        self._look_at_parameters(number, joined)

    def _look_at_parameters(self, number: int, joined: bool) -> None:
        """Follow parameters that were frozen, unfrozen, added or replaced since the last step,
        and refuse left-over gradients. `joined`: the state was just received from members that
        may train other parameters by now."""
        self.replica.reshard()
        self._checks.refuse_left_over_gradients(number)
        self._clipping.refuse_other_groups()
        if self._checks.changed():
            rank_exit.log(f"step {number}: other parameters are trained than before")
            self.gradients.lay_out(self.model.parameters())
            self._checks.settle()
            if not joined:
                # Other replicas may not have changed theirs. Buckets of different sizes must not be
                # reduced together: the first attempt fails on all replicas, and the census shows
                # which one differs.
                self.world.cross.abort_operations()

    def _begin(self, number: int, joins: list[Incident]) -> None:
        """Begin the step; before that, go on without replicas that leave, admit replicas that have
        asked to join, or let those that are joining become members."""
        transaction = self.transaction
        leaving, too_slow = transaction.take_leavers(), self.position.stragglers.take_eviction()
        ready = transaction.take_ready()  # if replicas leave now, the next vote shows it again
        if leaving:
            self.position.stragglers.postpone(too_slow)
            transaction.begin(number, self._fingerprint(number, self._compares_all))
            joins = [*joins, transaction.let_leave(leaving)]
        elif too_slow:
            transaction.begin(number, self._fingerprint(number, self._compares_all))
            joins = [*joins, transaction.evict(too_slow)]
        elif self.world.steps_made == 1 and transaction.take_join_request():
            transaction.begin(number, self._fingerprint(number, self._compares_all))
            joins = [*joins, *self.handover.admit()]
        elif ready:
            transaction.begin(number, self._fingerprint(number, self._compares_all))
            joins = [*joins, *self.handover.complete()]
        self.world.hooks.came = {replica for incident in joins for replica in incident.joined_replicas}
        if self.world.hooks.came:
            self._samples.seat(self.world.replicas)
            self._compares_all = True  # the first vote of a joining replica shows all that it was given
        self._leave_request.forget_agreement()
        transaction.begin(number, self._fingerprint(number, self._compares_all), joins)
        self.world.hooks.dealt({share.replica: share.run for share in transaction.layout.shares})

    def _rehearse(self, stream: Stream[T], by_rounds: bool) -> Generator[list[T], None, None]:
        """Run one microbatch before asking to join, so that the members do not wait for what the
        first microbatch creates, compiles or loads."""
        self._by_rounds = by_rounds
        self.replica.reshard()
        self._checks.refuse_left_over_gradients(0)
        with self._randomness.apart():
            self.transaction.begin(0, 0)
            yield self._hand_out(stream, [0], "warm-up", post=False)
        self._put_back()

    def _hand_out(self, stream: Stream[T], slots: list[int], place: str, post: bool) -> list[T]:
        self.world.hooks(place)
        batches = self._in_flight.read(stream, self.transaction.index, slots)
        self.buffers.hand_out()
        counts = self._checked.counts
        self._posts, self._expected = post, SlotSet((slot, slot + 1) for slot in slots if counts)
        self.gradients.expect(self._post_of_this, self._expected, self._by_rounds)
        self._habits.handed_out()
        self.seed_microbatch(0)
        return batches

    def _leave(self) -> None:
        """Give the step up on this rank, after a `break` or an exception, and wake ranks that wait
        for its sums.

        The other replicas come to the vote without a sum. When this replica comes to the vote,
        too, in its next step, all repair without a loss, and reduce what they hold in the new
        epoch.
        """
        if not rank_exit.is_rank():
            return  # a forked child has a copy of the iterator
        self.world.cross.abort_operations("a replica has left its step early")
        # Drained before anything is put back: the communication thread must not read or write sums that are
        # being cleared.
        self.world.cross.drain()
        self._put_back()
        self.transaction.leave()

    def _put_back(self) -> None:
        """Undo what was run: it does not count."""
        self._in_flight.leave()
        self._checked.leave()
        self.gradients.clear()  # what comes into `p.grad` from here on is the user's
        self.gradients.release()
        self.buffers.restore()
        self._samples.put_back()

    def _fingerprint(self, number: int, full: bool) -> DeviceValue[int]:
        return self.compared.fingerprint(number, full, self.extra_comparison.fingerprint)

    def _commit(self, number: int) -> None:
        """Apply the step that all replicas have agreed on."""
        transaction, world = self.transaction, self.world
        result = self.result = result_of(transaction, self.position.stragglers, number)
        if world.arrivals:
            self.result = replace(result, joining=self.handover.progress)
        self._samples.committed(result.all_samples, contributed=bool(result.samples))
        if transaction.is_last:
            self._leave_request.note_agreement()
        world.hooks("update")
        if result.skipped:
            self.buffers.restore()
            self.position.skipped += 1
            self.handover.giver.skipped(number)
        else:
            self._update(number)
            transaction.maxima.commit()
            if warning := transaction.maxima.take_warning():
                rank_exit.log(f"step {number}: {warning}")
        if warning := transaction.verification.take_warning():
            rank_exit.report(f"step {number}: {warning}", world.rank == min(world.members))
        self.handover.committed(result.incidents)
        self._skipped.committed(number, result, transaction.totals.samples_not_finite)
        self.gradients.release()
        world.hooks("after-update")
        if self.scheduler is not None:
            self._habits.step_scheduler(self.scheduler)
        self.position.index = number
        self._compares_all = False
        transaction.finish()
        self._in_flight.committed()
        self.on_first.committed(transaction.all_quiet)
        world.board.accomplish(world.rank)
        world.hooks("advance")

    def _update(self, number: int) -> None:
        """Gradients, clipping, optimizers and running buffers: the same on all replicas."""
        totals = self.transaction.totals
        factors = self._clipping.factors([norm / totals.weight for norm in self.transaction.grad_norms])
        used = totals.used.tolist()
        self.gradients.install(totals.weight, factors, used)
        # Before the optimizers: hooks of theirs may read statistics of the whole step, such as the
        # number of tokens of each expert.
        self.buffers.settle(torch.from_numpy(totals.changes), len(totals.samples))
        self.handover.giver.before_update(number, totals.weight, factors, used)
        self._step_optimizers(number)
        self.handover.giver.after_update()

    def _step_optimizers(self, number: int) -> None:
        self._randomness.update(number)
        with self._habits.updating():
            for optimizer in self._optimizers:
                optimizer.step()

    def _end(self) -> None:
        """Leave an unfinished step: the script has ended, perhaps with an iterator in a variable."""
        if self._run is not None:
            self._run.close()


class MicrobatchLoop(Iterator[Any]):
    """The iterator that `Step.microbatches` and `Step.rounds` return: one step, begun by the first
    microbatch.

    The step is left when the iterator is closed or dropped before it is exhausted (a `break`, an
    exception in the loop), or when a newer iterator begins. Nothing of the engine may refer to
    it: dropping the last reference must leave the step at once, because the other replicas wait.
    """

    def __init__(self, engine: StepEngine, stream: Stream[Any], by_rounds: bool) -> None:
        self._engine, self._stream, self._by_rounds = engine, stream, by_rounds
        self._run: Run | None = None
        self._is_unfinished = False

    def __next__(self) -> Any:
        if self._run is None:
            self._run = self._engine.start(self._stream, self._by_rounds)
        elif self._is_unfinished and not self._engine.is_current(self._run):
            self._is_unfinished = False
            raise RuntimeError(
                f"step {self._engine.position.index + 1} was begun again since this microbatch was handed out; go on "
                "with the iterator that step.microbatches (or step.rounds) returned last"
            )
        self._is_unfinished = False
        batches = next(self._run)
        self._is_unfinished = True
        return batches if self._by_rounds else batches[0]

    def close(self) -> None:
        if self._run is not None:
            self._run.close()

    def __del__(self) -> None:
        self.close()
