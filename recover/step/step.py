"""`recover.Step`, the public API of a step: a loop over microbatches that has committed when it
ends.

step = recover.Step(world, model, optimizer, global_batch=256)
while step.index < 1000:
    for batch in step.microbatches(stream):
        step.backward(model(**batch).loss)
    print(step.index, step.loss)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from recover.gradients.module_gradients import Gradients
from recover.gradients.reduction import Bits, Reduction
from recover.gradients.replica_interface import replica_of
from recover.job.script_replay import ScriptReplay
from recover.policy import DEFAULT_POLICY, Layout
from recover.runs.writing.script_records import records_of
from recover.step.engine import MicrobatchLoop, StepEngine
from recover.step.errors import StateDivergedError
from recover.step.in_flight import Stream, T, check_stream
from recover.step.incident import Incident
from recover.step.joining.extra import Extra
from recover.step.joining.state_handover import JoinWay
from recover.step.loop.stragglers import StragglerEviction
from recover.step.loop.weights import Weight
from recover.step.model_checks import refuse_overlapping, refuse_scheduler
from recover.step.position import check_arguments, check_join, check_reduction_bits, check_verify
from recover.step.result import StepResult
from recover.step.samples import SampleMode
from recover.step.schedulers import as_one_scheduler
from recover.step.skipped import SKIP_LIMIT
from recover.step.state import StepState
from recover.world import rank_exit
from recover.world.world import World


def _field_of_result(name: str) -> Any:
    return property(lambda step: getattr(step.result, name), doc=f"`{name}` of the last committed step.")


class Step:
    """Optimizer steps, each on exactly `global_batch` microbatches, whichever replicas die.

    world:         from `recover.init()`
    model:         a module, the same on every replica (parameters and buffers are copied from the first one);
                   parameters may be frozen and unfrozen between steps, on all replicas alike
    optimizer:     any torch optimizer over the model's trainable parameters, and no others; or a list of optimizers,
                   each parameter in one of them (Muon for matrices, AdamW for the rest). The learning rate in the
                   records is that of the first group of the first one
    global_batch:  B, microbatches per optimizer step over all replicas
    policy:        `balanced` (default), `paced` (slow replicas run fewer microbatches), `static` (the paper's roles and
                   spares) or `adaptive` (the batch shrinks)
    samples:       `exact` (default) or `partitioned`
    clip:          limit of the global gradient norm; or a list with one entry for each parameter group of the
                   optimizers, in their order: each group is clipped by the norm of its own gradients, and None leaves
                   it unclipped. With recover.threed only a number
    scheduler:     a learning-rate scheduler, advanced once per committed step; or a list of them
    seed:          random draws in a microbatch follow from (seed, step, slot), not from the replica that computes it;
                   draws outside of the loop over microbatches are unaffected
    reduction:     `fast`, or `reproducible`: the same bits for any number of replicas, with and without deaths
    reduction_bits:  of the words in which reproducible sums are kept and sent: 64, or 32, which is half the traffic and
                   less than half the memory, for a global_batch of at most 256. See docs/explanation/protocol.md
    bucket_mb:     size of a gradient bucket; by default 25, on a GPU 50
    gradients:     source of the buckets, for models that another library wraps (see `recover.dropin`)
    buffers:       names of buffers that forward changes, in addition to those of BatchNorm and similar modules: a step
                   adds the mean of the changes of its microbatches to them
    extra:         further state of the run, by name: objects with `state_dict` and `load_state_dict` (an EMA of the
                   model, a scheduler that your loop calls), or dicts of numbers, strings, lists and tensors that you
                   change in place. `recover.save` and `recover.resume` include it, and joining replicas receive it;
                   entries may be added to `step.extra` before the first step
    skip_limit:    skipped steps in a row (the gradient is not finite, or all weights are 0) after which all replicas
                   raise; 0 or None: never
    min_replicas:  if hosts are asked to leave the job and fewer replicas would stay, all stop instead (`stop_agreed`)
    verify:        K slots of each step are also computed by a second replica, and their gradients are compared bit by
                   bit: a replica whose device computes wrong results is evicted before the step commits. 0: none.
                   Needs samples="exact" and deterministic kernels, which the first step checks. Above 0,
                   reproducible sums are checked by checksums, too
    evict_stragglers:  `recover.StragglerEviction(factor=4)`: the others go on without a replica that takes four
                   times as long as they do; None: never
    join:          how a joining replica gets the state: `pause`, all of it between two steps; or `instalments`, a few
                   parameters with each step, while the others train on
    """

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        global_batch: int,
        *,
        policy: str = DEFAULT_POLICY,
        samples: SampleMode = "exact",
        clip: float | Sequence[float | None] | None = None,
        scheduler: Any = None,
        seed: int = 0,
        reduction: Reduction = "fast",
        reduction_bits: Bits = 64,
        bucket_mb: float | None = None,
        gradients: Gradients | None = None,
        buffers: Iterable[str] = (),
        extra: Mapping[str, Extra] | None = None,
        skip_limit: int | None = SKIP_LIMIT,
        min_replicas: int = 1,
        verify: int = 0,
        evict_stragglers: StragglerEviction | None = None,
        join: JoinWay = "pause",
    ) -> None:
        check_arguments(world, model, optimizer, global_batch, clip, reduction, gradients, bucket_mb, extra)
        check_reduction_bits(reduction_bits, reduction, global_batch)
        check_verify(verify, global_batch, samples, gradients)
        check_join(join)
        refuse_scheduler(scheduler)
        scheduler = as_one_scheduler(scheduler)
        refuse_overlapping(model)
        replica_of(model).reshard()
        self.extra = dict(extra or {})
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._engine = StepEngine(
            world,
            model,
            optimizer,
            global_batch,
            policy=policy,
            samples=samples,
            clip=clip,
            scheduler=scheduler,
            seed=seed,
            reduction=reduction,
            reduction_bits=reduction_bits,
            bucket_mb=bucket_mb,
            gradients=gradients,
            buffers=buffers,
            extra=self.extra,
            skip_limit=skip_limit,
            min_replicas=min_replicas,
            verify=verify,
            evict_stragglers=evict_stragglers,
            join=join,
            records=lambda: records_of(world, self, model, optimizer, samples == "exact"),
            save_states=lambda error: self.save_states(error),
        )
        self._gradients = self._engine.gradients

    @property
    def result(self) -> StepResult:
        """The last committed step; its fields are also properties of the step itself."""
        return self._engine.result

    @property
    def index(self) -> int:
        """Number of committed steps. `load_state_dict` sets it together with the next sample."""
        return self._engine.position.index

    @property
    def skipped(self) -> int:
        """Number of committed steps that did not call the optimizer: the gradient was not
        finite, or all weights were 0."""
        return self._engine.position.skipped

    # Fields of `result`, under the names of the step.
    loss: float = _field_of_result("loss")
    """Weighted mean loss of the last committed step over all its microbatches."""
    grad_norm: float = _field_of_result("grad_norm")
    """Global gradient norm of the last committed step, before clipping."""
    weight: float = _field_of_result("weight")
    """Sum of the weights of the last committed step; by default the number of microbatches."""
    samples: list[int] = _field_of_result("samples")
    """Samples that this replica contributed to the last committed step."""
    all_samples: list[int] = _field_of_result("all_samples")
    """Samples of the last committed step over all replicas."""
    incidents: list[Incident] = _field_of_result("incidents")
    """Losses and joins that the last committed step dealt with."""
    stragglers: dict[int, float] = _field_of_result("stragglers")
    """Replicas that were far slower than the median in the last committed step, with the factor."""
    busy: dict[int, float] = _field_of_result("busy")
    """Seconds that each replica computed its share of the last committed step."""
    reruns: int = _field_of_result("reruns")
    """How often the last committed step was run again because a value exceeded its exponents
    (reproducible sums)."""

    verified: int = _field_of_result("verified")
    """Slots of the last committed step whose gradients two replicas computed alike (`verify`)."""
    unverified: int = _field_of_result("unverified")
    """Slots of the last committed step that were to be verified and lost their pair by a death."""
    corrupt: int = _field_of_result("corrupt")
    """Replicas that were evicted in the last committed step because a gradient of theirs, or their
    sum of gradients, was wrong."""
    wrong_sums: int = _field_of_result("wrong_sums")
    """Reduced sums that were wrong on a rank in the last committed step, and were reduced again."""

    @property
    def stop_agreed(self) -> bool:
        """Whether a stop was requested before the last commit, by `request_stop` on any rank or by
        a signal to the launcher; the same on all replicas.

        A script that reads it is asked to stop by the first Ctrl-C (SIGINT) or SIGTERM, and is
        ended by the second. Other scripts are ended by the first.
        """
        self._engine.stop_request.heed()
        return self.result.stop_agreed

    @property
    def world(self) -> World:
        return self._engine.world

    @property
    def layout(self) -> Layout:
        """The layout (slots by replica) with which the last step began."""
        return self._engine.transaction.layout

    @property
    def policy(self) -> str:
        """The name of the policy."""
        return self._engine.transaction.policy.name

    @property
    def numerics(self) -> dict[str, Any]:
        """Settings that the bits of the sums depend on."""
        return {
            "reduction": "reproducible" if self._engine.exact_sum else "fast",
            "words": sorted({str(bucket.local.dtype) for bucket in self._gradients.buckets}),
            "buckets": [bucket.local.numel() for bucket in self._gradients.buckets],
        }

    def save_states(self, error: StateDivergedError) -> None:
        """Called before the run ends because replicas hold different states: `recover.Step` saves one
        copy of each."""

    def microbatches(self, stream: Stream[T]) -> Iterator[T]:
        """The microbatches that this replica owes to the step, extra ones after a death included.

        Call `backward` after each of them. The step is committed when the iterator is exhausted.
        """
        self._read_from(stream)
        return MicrobatchLoop(self._engine, stream, by_rounds=False)

    def rounds(self, stream: Stream[T]) -> Iterator[list[T]]:
        """The microbatches that this replica owes to the step as whole rounds, for a pipeline: each round
        has all that are owed at that time. Call `backward` after each round."""
        if self._engine.buffers.size:
            raise ValueError(
                "forward changes buffers of this model (those of BatchNorm, or named by buffers=), and inside a round "
                "the change of one microbatch cannot be told from that of the next; use step.microbatches"
            )
        self._read_from(stream)
        # A round has several backward passes: its buckets are full only after the last of them.
        return MicrobatchLoop(self._engine, stream, by_rounds=True)

    def _read_from(self, stream: Any) -> None:
        check_stream(stream)
        if (warning := self._engine.position.read_from(stream)) is not None:
            rank_exit.report(warning, self.world.rank == min(self.world.members))

    def backward(self, loss: torch.Tensor, weight: Weight = None) -> None:
        """Run backward of the microbatch (or round) in flight. `loss` counts `weight` times in the
        mean.

        The gradient of a step is sum(weight * gradient) / sum(weight), over all microbatches,
        and in a sharded replica over all of its ranks: give the mean over your own tokens with
        their number, and the step has the mean over all tokens. After a round, `loss` is the sum
        over its microbatches, or a tensor with one value for each, and `weight` may be a list. A
        loss without a graph is only recorded: a pipeline has run its backward passes already,
        with these weights.
        """
        self._engine.backward(loss, weight)

    def own_backward(self, weight: Weight = None) -> AbstractContextManager[Callable[..., None]]:
        """A context around forward and backward of the microbatch in flight, for trainers that run
        backward themselves: a pipeline schedule, or a loss that goes back chunk by chunk.

            with step.own_backward(weight=tokens) as record:
                loss_sum = schedule.step(batch)      # calls backward(), as often as it likes
                record(loss_sum / tokens)

        It replaces `backward`. The gradients must be those of `weight` times the loss of the
        microbatch: a loss that is summed over tokens has the weight of their number. The function
        that it yields records the loss itself, and runs nothing. Buckets are reduced after the
        context, because a parameter may get several gradients inside. If the loss is known before the
        last backward pass, `record(loss, before_last_pass=True)` just before that pass lets buckets be
        reduced while it runs. Changes of `buffers=` by recomputation in backward count.
        """
        return self._engine.own_backward(weight)

    def seed_microbatch(self, number: int, stage: int = 0) -> None:
        """Seed the random generators for microbatch `number` (from 0) of the round in flight.

        Call it before each forward pass of a pipeline of your own; `stage` distinguishes the
        stages of one rank. Without it a whole round draws as its first microbatch, so draws
        depend on which replica computes which microbatches.
        """
        self._engine.seed_microbatch(number, stage)

    def request_stop(self) -> None:
        """Ask all replicas to stop after the same step, which sets `stop_agreed`. A signal handler
        may call it."""
        self._engine.transaction.request_stop()

    def compare_optimizers(self) -> None:
        """Let the next vote compare all state (optimizer, scheduler, extra and parameters), because
        a checkpoint was just made of it. All replicas must call it after the same step."""
        self._engine.compare_all_state()

    def saving(self) -> AbstractContextManager[None]:
        """A context around `recover.save`, whose time is recorded as that of a checkpoint."""
        spent: AbstractContextManager[None] = self._engine.records.spending("checkpoint_ms")
        return spent

    @contextmanager
    def saving_extra(
        self, given: Mapping[str, Any], digests: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        """A context inside `saving`.

        given:    entries that `recover.save` was given in addition to `self.extra`
        digests:  digests of all entries

        Yields a function that compares the digests over the replicas; all of them must call it
        before `confirm`.
        """
        self._engine.joinable.saved(given)

        def compare() -> None:
            rank_exit.in_step(True)  # as in `confirm`
            self._engine.extra_comparison.compare(self.index, digests)
            rank_exit.in_step(False)

        try:
            yield compare
        finally:
            self._engine.extra_comparison.fingerprint = b""

    def confirm(self) -> tuple[tuple[int, ...], float]:
        """Compare parameters and optimizer state over all replicas after the last step, and evict
        replicas that differ from the majority.

        During training every vote compares the result of the update before it; this compares that of
        the last one. Returns the ranks that were lost meanwhile, and the seconds of their repairs.
        """
        return self._engine.confirm()

    def on_first(
        self, act: Callable[..., Any], *arguments: Any, background: bool = False, **named: Any
    ) -> None:
        """Call `act(*arguments, **named)` on the first rank of the first living replica, and on no
        other rank.

        All replicas must call this after the same step, outside of the loop over microbatches.
        If the calling rank dies before `act` returns, its successor calls it, so `act` may run
        twice. An exception of `act` is logged and ends nothing. Random draws of `act` leave the
        user's generators unchanged. `background`: run `act` in a thread, in order, while
        training continues; it may then neither draw nor use the model. In a sharded replica
        `act` runs on one rank only and must not compute with the model.
        """
        self.refuse_on_one_replica("step.on_first")
        if self._engine.replay is not None:
            return  # a replay leaves nothing behind
        name = getattr(act, "__qualname__", repr(act))
        with self._engine.records.spending("evaluation_ms"):
            self._engine.on_first.call(self.index, partial(act, *arguments, **named), name, background)

    def record_heldout_loss(self, loss: float) -> None:
        """Record a loss on held-out data, evaluated after the last committed step, for the live
        page and the report.

        Call it on all replicas or in a function for `on_first`, outside of the loop over
        microbatches. The next line of `steps.jsonl` has the value, or `summary.json` after the
        last step. A loss that is not finite is not recorded. In `on_first` it must not run with
        `background=True`, and the value is lost if that rank dies in the next step.
        """
        self.refuse_inside_step("step.record_heldout_loss")
        if math.isfinite(value := float(loss)):
            self._engine.records.heldout(value)

    def refuse_inside_step(self, what: str) -> None:
        """Raise RuntimeError inside the loop over microbatches, where replicas are at different
        microbatches."""
        if self._engine.is_inside_step:
            raise RuntimeError(
                f"{what} was called inside the loop over microbatches, which no two replicas go through alike; call it "
                "after the loop: the step is committed when it ends"
            )

    def refuse_on_one_replica(self, what: str) -> None:
        """Raise RuntimeError where not all replicas take part: inside the loop over microbatches, and in
        a function for `on_first`."""
        self.refuse_inside_step(what)
        self._engine.on_first.refuse_inside(what)

    @property
    def replay(self) -> ScriptReplay | None:
        """The order of the replay that this script runs in; None if it is no replay."""
        return self._engine.replay

    def report_resume(self, place: str, saved: Mapping[str, Any]) -> None:
        """Note that `recover.resume` has filled this step from a checkpoint with these extras."""
        self._engine.joinable.resumed(self.index, place, saved)

    def state(self, extra: Mapping[str, Any] | None = None) -> StepState:
        """The whole state after the last committed step; `extra`: entries of the user in
        addition to `self.extra`."""
        return StepState(self._model, self._optimizer, self._scheduler, {**self.extra, **(extra or {})})

    def state_dict(self) -> dict[str, Any]:
        """The step's own position; model, optimizer and scheduler have state of their own."""
        return self._engine.position.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, rebatch: bool = False) -> None:
        """Continue after the last step of the run that saved this state, on any number of replicas.

        `rebatch`: allow another global batch. No sample is used twice, and none is left out.
        """
        self._engine.position.load_state_dict(state, rebatch)
