"""The user's side of the step: a loop over microbatches that has committed when it ends.

step = recover.Step(world, model, optimizer, global_batch=256)
while step.index < 1000:
    for batch in step.microbatches(stream):
        step.backward(model(**batch).loss)
    print(step.index, step.loss)
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import torch

from recover.gradients.deferred import Later
from recover.gradients.module_gradients import Gradients, OwnedGradients
from recover.gradients.reduction import Reduction, make_sum
from recover.gradients.replica_interface import replica_of
from recover.gradients.running_buffers import MovingBuffers
from recover.policy import DEFAULT_POLICY, Layout, SlotSet, get_policy
from recover.runs.writing.script_records import records_of
from recover.step.compared_state import ComparedState
from recover.step.errors import StateDivergedError
from recover.step.extra_comparison import ExtraComparison
from recover.step.in_flight import HandedOut, Stream, T, refuse_what_is_no_stream
from recover.step.incident import Incident
from recover.step.initial_state import copy_state_from_first_replica
from recover.step.joining.extra import Extra
from recover.step.joining.joinable import Joinable
from recover.step.joining.state_handover import Newcomers
from recover.step.loop.clock import clock_of
from recover.step.loop.habits import Habits
from recover.step.loop.stragglers import Stragglers
from recover.step.loop.weights import Weight, losses_of, refuse_other_backwards, weighted, weights_of
from recover.step.model_checks import Belonging, refuse_overlapping, refuse_scheduler
from recover.step.on_first import OnFirst
from recover.step.position import Position, check_arguments, refuse_other_size
from recover.step.randomness import Randomness
from recover.step.result import StepResult, result_of
from recover.step.samples import SampleMode, sample_mode
from recover.step.state import StepState
from recover.step.transaction import Transaction
from recover.step.update import Update
from recover.world import rank_exit
from recover.world.calls import Call
from recover.world.world import World


class Step:
    """Optimizer steps, each on exactly `global_batch` microbatches, whoever dies.

    world:         from `recover.init()`
    model:         a module, the same on every replica (parameters and buffers are copied from the first one);
                   parameters may be frozen and unfrozen between steps, on all replicas alike
    optimizer:     any torch optimizer over the model's trainable parameters, and no others
    global_batch:  B, microbatches per optimizer step over all replicas
    policy:        `balanced` (default), `static` (the paper's roles and spares) or `adaptive` (the batch shrinks)
    samples:       `exact` (default) or `partitioned`
    clip:          limit of the global gradient norm
    scheduler:     a learning-rate scheduler, advanced once per committed step
    seed:          random draws in a microbatch follow from (seed, step, slot), not from which replica computes it;
                   draws outside of the loop over microbatches are the user's own, and go on as if there were no step
    reduction:     `fast`, or `reproducible`: bits that do not depend on who computed what, or on how many replicas
    bucket_mb:     size of a gradient bucket; by default 25, on a GPU 50
    gradients:     where the buckets come from, if not from the model's own parameters (see `recover.dropin`)
    buffers:       names of buffers that forward changes, beside those of BatchNorm and its kin: after a step they are
                   what they were before it plus the mean of what its microbatches did to them
    extra:         what else belongs to the state of the run, by name: objects with `state_dict` and
                   `load_state_dict` (a moving average of the model, a scheduler that your loop calls), or dicts of
                   numbers, strings, lists and tensors that you change in place. `recover.save` and `recover.resume`
                   use it, and a replica that joins is given it; `step.extra` may be added to before the first step
    """

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        global_batch: int,
        *,
        policy: str = DEFAULT_POLICY,
        samples: SampleMode = "exact",
        clip: float | None = None,
        scheduler: Any = None,
        seed: int = 0,
        reduction: Reduction = "fast",
        bucket_mb: float | None = None,
        gradients: Gradients | None = None,
        buffers: Iterable[str] = (),
        extra: Mapping[str, Extra] | None = None,
    ) -> None:
        check_arguments(world, model, optimizer, global_batch, clip, reduction, gradients, bucket_mb, extra)
        refuse_scheduler(scheduler)
        refuse_overlapping(model)
        replica_of(model).rest()
        self._belonging = Belonging(model, optimizer, gradients)
        refuse_other_size(world, model)
        world.steps_made += 1
        self.result = StepResult()  # of the last committed step
        self._world, self._model, self._optimizer = world, model, optimizer
        self._scheduler = scheduler
        self._randomness = Randomness(seed, world.shard)
        replica_of(model).seed_with(self.seed_microbatch)
        self._exact_sum = reduction == "reproducible"
        self._samples = sample_mode(samples, policy, global_batch, world.replica, world.grid.replicas)
        self._gradients = gradients or OwnedGradients(
            model.parameters(),
            bucket_mb,
            make_sum(reduction, global_batch),
            replica_of(model),
            self._belonging.name,
        )
        self._habits = Habits(model, optimizer)
        self._moving = MovingBuffers(model, buffers, self._gradients.sum, replica_of(model), not gradients)
        self._transaction = Transaction(
            world,
            self._gradients,
            get_policy(policy, world.grid.replicas),
            global_batch,
            replica_of(model),
            self._moving,
        )
        self._on_first = OnFirst(world, self._randomness)
        self._transaction.is_quiet = self._on_first.is_quiet
        self._position = Position(
            global_batch, self._samples, Stragglers(rank_exit.log), self._gradients.sum.exponents
        )
        device = self._gradients.parameters[0].device
        self._handed_out = HandedOut(world, self._samples, self._randomness, clock_of(device))
        self._update = Update(optimizer, clip, self._randomness, self._habits)
        self._by_rounds = False
        self._attempt: Generator[list[Any], None, None] | None = None  # the step under way, or the last one
        self._torn = False  # agreed on, and not wholly applied
        self._compares_all = False  # the next vote compares all state, and not parameters and settings alone
        self._records = records_of(world, self, model, optimizer, samples == "exact")
        self.extra = dict(extra or {})
        self._compared = ComparedState(
            self._belonging,
            optimizer,
            self._moving,
            scheduler,
            lambda: self.extra,
            self._gradients.sum.exponents,
        )
        self._transaction.entries = self._compared.digests
        self._looks_for_obstacles = 2
        self._said_skipped = False
        self._extra_comparison = ExtraComparison(world)
        ours: dict[str, Extra] = {
            "recover.runs.records": self._records,
            "recover.compared": self._extra_comparison,
        }
        extras = ChainMap[str, Extra](self.extra, ours)
        state, take_over = (model, optimizer, scheduler, extras), self._on_first.take_over
        self._joinable = Joinable(world, state, self.extra)
        self._newcomers = Newcomers(
            world, self._transaction, self._position, state, take_over, self._joinable
        )
        if not world.outside:
            copy_state_from_first_replica(world, model)
        world.hooks.watch(model, self._gradients)
        rank_exit.on_raise(self._handed_out.blame)
        rank_exit.on_success(self._end)

    @property
    def index(self) -> int:
        """Number of committed steps. `load_state_dict` sets it together with the next sample."""
        return self._position.index

    @property
    def skipped(self) -> int:
        """Number of committed steps that did not call the optimizer: the gradient was not finite, or all weights were
        0."""
        return self._position.skipped

    @property
    def loss(self) -> float:
        """Weighted mean loss of the last committed step over all its microbatches."""
        return self.result.loss

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last committed step, before clipping."""
        return self.result.grad_norm

    @property
    def weight(self) -> float:
        """Sum of the weights of the last committed step; by default the number of microbatches."""
        return self.result.weight

    @property
    def samples(self) -> list[int]:
        """Samples that this replica contributed to the last committed step."""
        return self.result.samples

    @property
    def all_samples(self) -> list[int]:
        """Samples of the last committed step, over all replicas."""
        return self.result.all_samples

    @property
    def incidents(self) -> list[Incident]:
        """Losses and joins that the last committed step dealt with."""
        return self.result.incidents

    @property
    def stragglers(self) -> dict[int, float]:
        """Replicas that were far slower than the median in the last committed step, with the factor."""
        return self.result.stragglers

    @property
    def busy(self) -> dict[int, float]:
        """Seconds that each replica computed its share of the last committed step."""
        return self.result.busy

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank had called `request_stop` before the last commit; the same on all replicas."""
        return self.result.stop_agreed

    @property
    def reruns(self) -> int:
        """How often the last committed step was run again because a value exceeded its exponents (reproducible
        sums)."""
        return self.result.reruns

    @property
    def world(self) -> World:
        return self._world

    @property
    def layout(self) -> Layout:
        """The layout (slots by replica) with which the last step began."""
        return self._transaction.layout

    @property
    def numerics(self) -> dict[str, Any]:
        """Settings that the bits of the sums depend on."""
        return {
            "reduction": "reproducible" if self._exact_sum else "fast",
            "buckets": [bucket.local.numel() for bucket in self._gradients.buckets],
        }

    def save_states(self, error: StateDivergedError) -> None:
        """Replicas hold different states, and the run is about to end. `recover.Step` saves one of each."""

    def microbatches(self, stream: Stream[T]) -> Iterator[T]:
        """The microbatches that this replica owes to the step, extra ones included; call `backward` after each."""
        for batches in self._shares(stream, lambda slots: [[slot] for slot in slots], overlap=True):
            yield batches[0]

    def rounds(self, stream: Stream[T]) -> Iterator[list[T]]:
        """The same, as whole rounds: all that is owed at once, for a pipeline. Call `backward` after each."""
        if self._moving.size:
            raise ValueError(
                "forward changes buffers of this model (those of BatchNorm, or named by buffers=), and inside a round "
                "the change of one microbatch cannot be told from that of the next; use step.microbatches"
            )
        # A round has several backward passes: its buckets are full only after the last of them.
        yield from self._shares(stream, lambda slots: [slots] if slots else [], overlap=False)

    def backward(self, loss: torch.Tensor, weight: Weight = None) -> None:
        """Backward of the microbatch (or the round) just handed out. `loss` counts `weight` times in the mean.

        The gradient of a step is sum(weight * gradient) / sum(weight), over all microbatches, and in a sharded
        replica over all of its ranks: give the mean over your own tokens with their number, and the step has the mean
        over all tokens. After a round, `loss` is the sum over its microbatches, or a tensor with one value for each,
        and `weight` may be a list. A loss without a graph is only recorded: a pipeline has run its backward passes
        already, with these weights.
        """
        pending = self._handed_out.pending
        if not pending:
            raise RuntimeError(
                "step.backward was called without a microbatch; call it once for each one handed out"
            )
        ran_with = self._transaction.replica.weights_of_round()
        weights = weights_of(weight, ran_with, loss, len(pending), self._exact_sum)
        refuse_other_backwards(loss, self._gradients.came, self._by_rounds)
        self._world.hooks("backward")
        self._moving.take()
        self._gradients.ready()
        with self._habits.backward(loss, (self._transaction.global_batch, len(self._transaction.share.run))):
            if loss.requires_grad:
                weighted(loss, weights).backward()
        self._gradients.collect()
        for (slot, sample), value, each in zip(pending, losses_of(loss, len(pending)), weights, strict=True):
            self._transaction.finish_slot(slot, sample, value, each)
        self._world.hooks.computed(self._handed_out.seconds)
        self._transaction.computed(self._handed_out.computed(), len(pending))

    def seed_microbatch(self, number: int, stage: int = 0) -> None:
        """Random draws from here on are those of microbatch `number` (from 0) of the round handed out.

        For a pipeline of your own, before each forward pass; `stage` tells apart what one rank computes in several
        pieces. Without it a whole round draws as its first microbatch, and so depends on who computes what.
        """
        self._handed_out.seed(number, stage)

    def request_stop(self) -> None:
        """Ask all replicas to stop after the same step: `stop_agreed` tells when. May be called by a signal handler."""
        self._transaction.stop_requested = True

    def compare_optimizers(self) -> None:
        """Let the next vote compare all state (optimizer, scheduler and extra as well as parameters): a checkpoint has
        just been made of it. To be called by all replicas after the same step."""
        self._compares_all = self._transaction.seniority.compares = True

    @contextmanager
    def saving_extra(
        self, given: Mapping[str, Any], digests: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        """While `recover.save` saves. `given`: what it was given beside `self.extra`; `digests`: of all entries.

        Yields what compares them over the replicas: to be called by all of them before `confirm`.
        """
        self._joinable.saved(given)

        def compare() -> None:
            rank_exit.in_step(True)  # as in `confirm`
            self._extra_comparison.compare(self.index, digests)
            rank_exit.in_step(False)

        try:
            yield compare
        finally:
            self._extra_comparison.fingerprint = b""

    def confirm(self) -> tuple[tuple[int, ...], float]:
        """After the last step: all replicas hold the same parameters and the same optimizer state, or those that
        differ are gone.

        During training every vote tells of the update before it; this tells of the last one. Returns the ranks that
        were lost over it, and the seconds of their repairs.
        """
        met: list[tuple[tuple[int, ...], float]] = []
        with self._world.call(Call.CONFIRM, lambda *lost: met.append(lost)):
            self.compare_optimizers()
            number = self.index + 1
            replica_of(self._model).rest()
            rank_exit.in_step(True)  # what it may raise, all raise: that is no fault of this rank's
            try:
                met.append(self._transaction.confirm(number, self._fingerprint(number, full=True)))
            except StateDivergedError as error:
                self.save_states(error)
                raise
            self._transaction.seniority.found_equal(number)
            rank_exit.in_step(False)
        return tuple(rank for ranks, _ in met for rank in ranks), sum(seconds for _, seconds in met)

    def on_first(
        self, act: Callable[..., Any], *arguments: Any, background: bool = False, **named: Any
    ) -> None:
        """Call `act(*arguments, **named)` on the first rank of the first living replica, and on no other rank.

        All replicas must call this after the same step, outside of the loop over microbatches. If the calling rank dies
        before `act` returns, its successor calls it, so `act` may run twice. An exception of `act` is logged and ends
        nothing. Random draws of `act` leave the user's generators unchanged. `background`: run `act` in a thread, in
        order, while training continues; it may then neither draw nor use the model. In a sharded replica `act` runs on
        one rank only and must not compute with the model.
        """
        self.refuse_inside_step("step.on_first")
        name = getattr(act, "__qualname__", repr(act))
        self._on_first.call(self.index, partial(act, *arguments, **named), name, background)

    def refuse_inside_step(self, what: str) -> None:
        """Raise RuntimeError inside the loop over microbatches, where replicas are at different microbatches."""
        if self._attempt is not None and getgeneratorstate(self._attempt) != GEN_CLOSED:
            raise RuntimeError(
                f"{what} was called inside the loop over microbatches, which no two replicas go through alike; call it "
                "after the loop: the step is committed when it ends"
            )

    def state(self, extra: Mapping[str, Any] | None = None) -> StepState:
        """The whole state after the last committed step; `extra`: entries of the user in addition to `self.extra`."""
        return StepState(self._model, self._optimizer, self._scheduler, {**self.extra, **(extra or {})})

    def state_dict(self) -> dict[str, Any]:
        """The step's own position; model, optimizer and scheduler have state of their own."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, rebatch: bool = False) -> None:
        """Go on behind the last step of the run that saved this, on as many replicas as there are.

        `rebatch`: with another global batch, too. No sample is used twice, and none is left out.
        """
        self._position.load_state_dict(state, rebatch)

    def _shares(
        self, stream: Stream[T], cut: Callable[[list[int]], list[list[int]]], overlap: bool
    ) -> Iterator[list[T]]:
        """One step, which the others wait for. Only the newest iterator goes on; an older one was left."""
        refuse_what_is_no_stream(stream)
        self._on_first.take_over()
        if self._attempt is not None:
            self._attempt.close()
        attempt = self._attempt = self._attempts(stream, cut, overlap)
        try:
            for batches in attempt:
                yield batches
                if self._attempt is not attempt:
                    raise RuntimeError(
                        f"step {self.index + 1} was begun anew since this microbatch was handed out; go on with the "
                        "iterator that step.microbatches (or step.rounds) returned last"
                    )
        finally:
            attempt.close()

    def _attempts(
        self, stream: Stream[T], cut: Callable[[list[int]], list[list[int]]], overlap: bool
    ) -> Generator[list[T], None, None]:
        """Hand out what is owed, reduce, vote, recover, until the step commits."""
        arrived: list[Incident] = []
        if self._world.outside:
            yield from self._rehearse(stream, cut, overlap)
            arrived = self._newcomers.enter()
        transaction, number = self._transaction, self.index + 1

        def cut_and_announce(slots: list[int]) -> list[list[int]]:
            self._handed_out.announce(stream, slots)
            return cut(slots)

        if self._torn:
            raise RuntimeError(
                f"step {number} was agreed on, but an exception kept this replica from taking it: its parameters may "
                "be half updated; let that exception end the rank, and the others go on without it"
            )
        self._by_rounds = not overlap
        self._world.hooks.step = number
        if self._looks_for_obstacles:  # before the first step, and when the optimizer has made its state
            self._looks_for_obstacles -= 1
            self._joinable.report()
        self._look_at_parameters(number, given=bool(arrived))
        with self._records, self._world.step(number), self._randomness.apart():
            try:
                self._begin(number, arrived)
                self._world.hooks.dealt({share.replica: share.run for share in self.layout.shares})
                for slots, place, post in transaction.attempts(
                    cut_and_announce, overlap, self._samples.put_back
                ):
                    yield self._hand_out(stream, slots, place, post)
                    if self._handed_out.pending:
                        raise RuntimeError(
                            "the microbatch was not followed by step.backward(loss); call it for each one"
                        )
                    self._moving.refuse_later_changes()
            except GeneratorExit:
                if not self._handed_out.pending:  # by a `break`, or by an exception that is no microbatch's
                    rank_exit.in_step(False)
                self._leave()
                warnings.warn(
                    f"step {number} was left before it was complete: nothing was committed", stacklevel=4
                )
                raise
            except StateDivergedError as error:
                self._leave()
                self.save_states(error)
                raise
            except BaseException:
                self._leave()
                raise
            self._torn = True
            self._commit(number)
            self._torn = False

    def _begin(self, number: int, arrived: list[Incident]) -> None:
        """The step begins; before that, whoever has asked to join is taken in."""
        transaction = self._transaction
        if transaction.asked and self._world.steps_made == 1:
            transaction.begin(number, self._fingerprint(number, self._compares_all))
            arrived = self._newcomers.take_in()
        self._world.hooks.came = {replica for incident in arrived for replica in incident.joined_replicas}
        if self._world.hooks.came:
            self._samples.seat(self._world.replicas)
            self._compares_all = True  # the first vote of a newcomer shows all that it was given
        transaction.begin(number, self._fingerprint(number, self._compares_all))
        transaction.incidents += arrived

    def _rehearse(
        self, stream: Stream[T], cut: Callable[[list[int]], list[list[int]]], overlap: bool
    ) -> Generator[list[T], None, None]:
        """One microbatch that nobody waits for: whatever is made, compiled or loaded by the first is there then."""
        self._by_rounds = not overlap
        replica_of(self._model).rest()
        self._belonging.refuse_left_over_gradients(0)
        with self._randomness.apart():
            self._transaction.begin(0, 0)
            yield self._hand_out(stream, cut([0])[0], "warm-up", post=False)
        self._put_back()

    def _report_no_weight(self, number: int) -> None:
        if not self._said_skipped:
            self._said_skipped = True
            rank_exit.log(
                f"step {number} was skipped: the weights of all its microbatches are 0, so there is nothing to take "
                "the mean over, and its loss is NaN; later ones are not mentioned here"
            )

    def _end(self) -> None:
        """The script has ended, perhaps with an iterator in its hand."""
        if self._attempt is not None:
            self._attempt.close()

    def _leave(self) -> None:
        """The step is given up here, by a `break` or an exception. Whoever waits for this replica's sums is freed.

        The others come to the vote without a sum. When this replica comes there too, in its next step, all repair,
        nobody is lost, and what they hold is reduced in a new epoch.
        """
        if not rank_exit.is_rank():
            return  # a forked child has its copy of the iterator
        self._world.cross.break_off("a replica has left its step early")
        self._world.cross.drain()
        self._put_back()
        self._transaction.leave()

    def _put_back(self) -> None:
        """What was run does not count."""
        self._handed_out.leave()
        self._gradients.clear()  # what comes into `p.grad` from here on is the user's
        self._gradients.release()
        self._moving.restore()
        self._samples.put_back()

    def _hand_out(self, stream: Stream[T], slots: list[int], place: str, post: bool) -> list[T]:
        self._world.hooks(place)
        batches = self._handed_out.read(stream, self._transaction.index, slots)
        self._moving.hand_out()
        expected = SlotSet((slot, slot + 1) for slot in slots)
        self._gradients.expect(self._transaction.post if post else None, expected, self._by_rounds)
        self._habits.handed_out()
        self.seed_microbatch(0)
        return batches

    def _look_at_parameters(self, number: int, given: bool) -> None:
        """They may have been frozen, unfrozen, added or replaced since the last step, and hold gradients; or be `given`
        by others, who train other ones by now than this script did at its start."""
        self._transaction.replica.rest()
        self._belonging.refuse_left_over_gradients(number)
        if self._belonging.changed():
            rank_exit.log(f"step {number}: other parameters are trained than before")
            self._gradients.lay_out(self._model.parameters())
            self._belonging.settle()
            if not given:
                # Others may not have done the same. Buckets of different sizes must not meet: the first attempt fails
                # for all, and the census shows who differs.
                self._world.cross.break_off()

    def _fingerprint(self, number: int, full: bool) -> Later[int]:
        return self._compared.fingerprint(number, full, self._extra_comparison.fingerprint)

    def _commit(self, number: int) -> None:
        transaction = self._transaction
        self.result = result_of(transaction, self._position.stragglers, number)
        self._samples.committed(self.all_samples, contributed=bool(self.samples))
        self._world.hooks("update")
        if self.result.skipped:
            self._moving.restore()
            self._position.skipped += 1
            if not self.weight:
                self._report_no_weight(number)
        else:
            self._update.apply(transaction, number, self.grad_norm)
            transaction.maxima.commit()
            if warning := transaction.maxima.take_warning():
                rank_exit.log(f"step {number}: {warning}")
        self._gradients.release()
        self._world.hooks("after-update")
        if self._scheduler is not None:
            self._habits.step_scheduler(self._scheduler)
        self._position.index = number
        self._compares_all = False
        transaction.seniority.found_equal(number)
        self._handed_out.committed()
        self._on_first.committed(transaction.all_quiet)
        self._world.board.accomplish(self._world.rank)
        self._world.hooks("advance")
