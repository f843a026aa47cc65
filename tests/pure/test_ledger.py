"""The ledger in one process: a bucket that is handed to the reduction holds exactly the slots of the share, or it is
refused."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from lone_world import torch_world_of_one
from torch.nn.parallel import DistributedDataParallel

import recover.dropin
from recover.gradients.buckets import Bucket
from recover.gradients.ledger import LedgerError, check_buckets
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.replica_interface import PlainReplica, Sharing
from recover.policy import SlotSet
from recover.world.carriers.worker import Worker

SAMPLES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(slot)) for slot in range(8)]


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def loss_of(model: torch.nn.Module, slot: int) -> torch.Tensor:
    return model(SAMPLES[slot]).square().mean()


def slots(*numbers: int) -> SlotSet:
    return SlotSet((number, number + 1) for number in numbers)


class Group:
    """A group of two replicas with equal sums. The first `failing` reductions are aborted, and leave garbage."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor | None = None) -> SimpleNamespace:
        target = source if out is None else out
        ok = self.failing <= 0
        self.failing -= 1
        target.copy_(source * 2 if ok else torch.full_like(source, 7.0))
        return SimpleNamespace(ok=ok, refused=False, behind=lambda: None)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world for DDP inside a replica of one rank."""
    fake = SimpleNamespace(worker=Worker())
    monkeypatch.setattr("recover.dropin.ddp.init", lambda: fake)
    with torch_world_of_one():
        yield


@contextmanager
def by_hand(model: DistributedDataParallel) -> Iterator[None]:
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, False
    yield
    model.require_backward_grad_sync = before


HABITS = {
    "no_sync": lambda model: model.no_sync(),
    "the class's no_sync": DistributedDataParallel.no_sync,
    "by hand": by_hand,
}


def share(
    gradients: recover.dropin.DDPGradients,
    model: DistributedDataParallel,
    group: Group,
    epoch: int,
    run: tuple[int, ...],
    around: tuple[str, str],
    period: int,
) -> None:
    """Run these slots as a step does, in a loop that synchronises only every `period` microbatches."""
    habit, where = around
    post = lambda index, bucket: bucket.post(group, epoch, contribute=True)  # noqa: E731
    for number, slot in enumerate(run, start=1):

        def held_back(part: str, number: int = number) -> AbstractContextManager[object]:
            return HABITS[habit](model) if part in where and number % period else nullcontext()

        gradients.expect(post if number == len(run) else None, slots(slot))
        with held_back("forward"):
            loss = loss_of(model, slot)
        gradients.ready()
        with held_back("backward"):
            loss.backward()
        gradients.collect()
    if not run:
        gradients.post_all(post)


@pytest.mark.guarantee(
    "The trajectory",
    "A user's own `no_sync()` changes no gradient, wherever it is placed and whichever replica dies.",
)
@pytest.mark.filterwarnings("ignore:no_sync")
def test_own_no_sync_changes_no_gradient(world: None) -> None:
    """Tried for any share and period, around forward, backward or both, with a death before, during or after, or
    none."""
    shares = [((0, 1, 2), ()), ((0, 1), (2,)), ((0, 1), (2, 3, 4)), ((0,), ()), ((), (0, 1))]
    places = ("forward", "backward", "forward and backward")
    for (first, extra), period, habit, where, views, dies in itertools.product(
        shares, (2, 4), HABITS, places, (True, False), (True, False)
    ):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.0003, gradient_as_bucket_view=views)
        gradients = recover.dropin.DDPGradients(model, restore="blocking" if period == 2 else "non-blocking")
        group = Group(failing=100 if dies else 0)
        run = first if dies else first + extra
        gradients.begin()
        share(gradients, model, group, 1, run, (habit, where), period)
        check_buckets(1, gradients.buckets, slots(*run))
        if dies:
            gradients.rewind(overlapped=True)
            group.failing = 0
            share(gradients, model, group, 2, extra, (habit, where), period)
            check_buckets(1, gradients.buckets, slots(*first, *extra))
        gradients.install(2.0 * len(first + extra), [1.0], torch.ones(len(gradients.parameters)))
        alone = net()
        sum(loss_of(alone, slot) / len(first + extra) for slot in first + extra).backward()  # type: ignore[union-attr]
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                ours.grad,
                theirs.grad,
                msg=lambda text, case=(first, extra, period, habit, where, views, dies): f"{case}: {text}",
            )


def test_ineffective_no_sync_is_reported_once(world: None) -> None:
    model = DistributedDataParallel(net())
    recover.dropin.DDPGradients(model)
    with warnings.catch_warnings(record=True) as said:
        for _ in range(3):
            with model.no_sync():
                assert model.require_backward_grad_sync
    (once,) = said
    assert "it can be left out" in str(once.message)
    copy.deepcopy(model.no_sync)


@pytest.mark.guarantee(
    "The trajectory",
    "DDP buckets that are ambiguous (`static_graph`) or lack a trainable parameter are refused.",
)
def test_ambiguous_or_incomplete_ddp_buckets_are_refused(world: None) -> None:
    ignoring = net()
    first = next(name for name, _ in ignoring.named_parameters())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, [first])
    for model, words in (
        (DistributedDataParallel(net(), static_graph=True), "leave static_graph out"),
        (DistributedDataParallel(ignoring), f"the first is module.{first}"),
    ):
        with pytest.raises(ValueError, match=words):
            recover.dropin.DDPGradients(model)


class TwoPartners:
    """Two partners that have computed the same."""

    size = 2

    def add_up(self, sums: torch.Tensor) -> None:
        sums.mul_(2)


class SharingReplica(PlainReplica):
    def __init__(self, shared: torch.nn.Parameter) -> None:
        self._shared = shared

    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        return Sharing(copies=2, partners=PARTNERS) if parameter is self._shared else Sharing()


PARTNERS = TwoPartners()


@pytest.mark.guarantee(
    "The trajectory",
    "A step commits only if every bucket was posted in this attempt with exactly the slots that the replica "
    "owes.",
)
@pytest.mark.parametrize("rounds", [False, True])
def test_own_buckets_are_stamped_with_their_microbatches(rounds: bool) -> None:
    """Tried microbatch by microbatch and in rounds, with a parameter that partners share, after a rewind and after a
    clear."""
    model = net()
    gradients = OwnedGradients(
        model.parameters(), bucket_mb=0.0003, replica=SharingReplica(next(model.parameters()))
    )
    group = Group()

    def run(pieces: list[tuple[int, ...]], epoch: int) -> None:
        post = lambda index, bucket: bucket.post(group, epoch, contribute=True)  # noqa: E731
        for piece in pieces:
            last = piece is pieces[-1] and not rounds
            gradients.expect(post if last else None, slots(*piece))
            for slot in piece:
                loss_of(model, slot).backward()
            gradients.collect()
        if rounds:
            gradients.post_all(post)

    gradients.begin()
    run([(0, 1)] if rounds else [(0,), (1,)], 1)
    check_buckets(1, gradients.buckets, slots(0, 1))
    gradients.rewind(overlapped=False)
    with pytest.raises(LedgerError, match=r"bucket 0 of .* was not handed to the reduction"):
        check_buckets(1, gradients.buckets, slots(0, 1))
    run([(2,)], 2)
    check_buckets(1, gradients.buckets, slots(0, 1, 2))
    with pytest.raises(LedgerError, match="without slots 3 and with slots too many: 0"):
        check_buckets(1, gradients.buckets, slots(1, 2, 3))
    with pytest.raises(LedgerError, match="slots 2 are in the local sum already"):
        gradients.expect(None, slots(2))
    gradients.clear()
    run([(4,)], 3)
    check_buckets(1, gradients.buckets, slots(4))
    gradients.begin()
    gradients.post_all(lambda index, bucket: bucket.post(group, 4, contribute=True))
    check_buckets(2, gradients.buckets, slots())


def test_unfinished_microbatch_is_in_no_bucket() -> None:
    model = net()
    gradients = OwnedGradients(model.parameters(), bucket_mb=1)
    gradients.begin()
    gradients.expect(None, slots(0))
    gradients.begin()
    gradients.expect(None, slots(1))
    loss_of(model, 1).backward()
    gradients.collect()
    (bucket,) = gradients.buckets
    bucket.post(Group(), 1, contribute=True)  # type: ignore[arg-type]
    check_buckets(1, [bucket], slots(1))


def test_bucket_that_was_never_posted_is_named_with_the_remedy() -> None:
    with pytest.raises(LedgerError, match=r"bucket 0 of 1 was not handed.*owes slots 0-2.*step\.backward"):
        check_buckets(5, [Bucket(torch.zeros(2))], slots(0, 1, 2))
    with pytest.raises(LedgerError, match="no gradient bucket"):
        check_buckets(5, [], slots())
