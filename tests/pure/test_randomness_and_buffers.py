"""Weights, random draws and buffers of a step equal those of one process, whichever replicas computed or died."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from lone_world import BATCH, World, begin
from torch.utils.checkpoint import checkpoint
from toy_numbers import Net, draws, make_net, seed_user

from recover.gradients.reduction import FastSum, ReproducibleSum
from recover.gradients.replica_interface import PLAIN, PlainReplica
from recover.gradients.running_buffers import RunningBuffers
from recover.step.loop.weights import weighted, weights_of
from recover.step.position import check_position
from recover.step.randomness import Randomness
from recover.step.samples import ExactSamples

STATE = {"index": 3, "skipped": 0, "global_batch": 6, "samples": {"mode": "exact", "next": 18}}


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"index": 3, "skipped": 0, "samples": {}}, "does not tell which sample comes next"),
        ({**STATE, "samples": {"mode": "partitioned", "used": [[9, 9]]}}, "samples='partitioned'"),
        ({**STATE, "global_batch": 4}, "global_batch=4, and this step has global_batch=6"),
    ],
)
def test_state_of_another_run_is_refused(state: dict[str, Any], complaint: str) -> None:
    check_position(STATE, STATE, rebatch=False)
    with pytest.raises(ValueError, match=complaint):
        check_position(state, STATE, rebatch=False)


def test_steps_of_changing_batches_use_each_sample_once() -> None:
    used, state = [], ExactSamples(1).state_dict()
    for batch, steps in ((6, 3), (4, 2), (9, 1)):
        samples = ExactSamples(batch)
        samples.load_state_dict(state)
        for step in range(1, steps + 1):
            used += [samples.index(step, slot) for slot in range(batch)]
            samples.committed([], contributed=True)
        state = samples.state_dict()
    assert used == list(range(6 * 3 + 4 * 2 + 9))


@pytest.mark.guarantee(
    "The trajectory",
    "Random draws of a microbatch slot depend neither on the replica nor on the round, and the ranks of a "
    "replica draw separately.",
)
def test_draws_depend_on_slot_step_shard_stage_and_purpose_only() -> None:
    seen: list[tuple[float, ...]] = []
    for shard in (0, 1):
        mine = Randomness(7, shard)
        places = itertools.product((1, 2), (0, 1), (0, 1))  # step, slot, stage
        starts = [partial(mine.compute, *place) for place in places]
        for start in [*starts, partial(mine.update, 1)]:
            start()
            seen.append(tuple(draws()))
            start()
            assert tuple(draws()) == seen[-1]
    for kind in zip(*seen, strict=True):  # each of the three generators
        assert len(set(kind)) == len(kind)
    reads = []
    for shard in (0, 1):
        Randomness(7, shard).read(1, 0)
        reads.append(tuple(draws()))
    assert reads[0] == reads[1]
    assert reads[0] not in seen


@pytest.mark.parametrize("usable", [True, False])
def test_forked_reader_leaves_the_gpu_generators_of_its_parent_alone(
    usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fork torch still has the generators of the GPUs, and any call to CUDA fails."""
    on_gpus = [torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: usable)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(on_gpus))
    Randomness(7, 0).sample(3)
    seeds = {generator.initial_seed() for generator in on_gpus}
    assert seeds == {torch.initial_seed() if usable else 0}


def test_error_inside_a_step_leaves_the_user_generators_unchanged() -> None:
    seed_user()
    expected = [draws(), draws()]
    seed_user()
    found = [draws()]

    def fail() -> None:
        with Randomness(0, 0).apart():
            Randomness(0, 0).compute(1, 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    found.append(draws())
    assert found == expected


def test_buffer_change_of_a_recomputed_microbatch_counts_once() -> None:
    """Under recomputation BatchNorm sees every microbatch twice. Restoring buffers does not disturb autograd."""
    net = make_net()
    moving = RunningBuffers(net, ["seen"], FastSum(), PLAIN)
    moving.begin()
    start, expected = [tensor.double() for tensor in moving.tensors()], torch.zeros(moving.size).double()
    for seed in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        moving.hand_out()
        loss = checkpoint(net, x, use_reentrant=False).sum()
        moving.take()
        loss.backward()
        alone = make_net()
        alone(x)
        after = RunningBuffers(alone, ["seen"], FastSum(), PLAIN).tensors()
        expected += torch.cat([(a.double() - b).flatten() for a, b in zip(after, start, strict=True)])
    torch.testing.assert_close(torch.from_numpy(moving.changes), expected)
    moving.settle(torch.from_numpy(moving.changes), 3)
    assert net.norm.num_batches_tracked == 3
    torch.testing.assert_close(net.norm.running_mean, expected[1:17].float() / 3)


@pytest.mark.parametrize("slots", [1, 5, 48])
def test_buffer_changes_do_not_depend_on_order_or_grouping(slots: int) -> None:
    settled = set()
    for order in (list(range(slots)), random.Random(0).sample(range(slots), slots)):
        for replicas in (1, 2, 5):
            totals = []
            for replica in range(replicas):
                net = make_net()
                moving = RunningBuffers(net, ["seen"], ReproducibleSum(slots), PLAIN)
                moving.begin()
                for slot in order[replica::replicas]:
                    moving.hand_out()
                    net(torch.randn(8, 8, generator=torch.Generator().manual_seed(slot)) * 3.0**slot % 17)
                    moving.take()
                assert all(largest < 2.0**13 for largest in moving.largest)
                totals.append(torch.from_numpy(moving.changes))
            moving.settle(torch.stack(totals).sum(0), slots)
            settled.add(torch.cat([t.double().flatten() for t in moving.tensors()]).numpy().tobytes())
    assert len(settled) == 1


class Grid(PlainReplica):
    peers_hold_all_buffers = False


def test_buffers_that_cannot_be_kept_equal_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no such buffer; its buffers are .*'norm.running_mean'"):
        RunningBuffers(Net(), ["norm.mean"], FastSum(), PLAIN)
    with pytest.raises(ValueError, match=r"norm.running_mean.*LayerNorm"):
        RunningBuffers(Net(), [], FastSum(), Grid())
    net = Net()
    net.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"'mask' is of torch.bool"):
        RunningBuffers(net, ["mask"], FastSum(), PLAIN)


@pytest.mark.parametrize("how", ["in place", "another tensor", "written with the same values"])
def test_constant_buffer_that_forward_changes_is_detected(how: str) -> None:
    net = torch.nn.Linear(2, 2)
    net.register_buffer("table", torch.arange(4.0))
    moving = RunningBuffers(net, [], FastSum(), PLAIN)
    moving.begin()
    net.table.add_(1)  # between two steps a user may change it
    moving.hand_out()
    moving.take()
    if how == "in place":
        net.table[2] += 1
    elif how == "another tensor":
        net.table = net.table * 2
    else:
        net.table.copy_(net.table.clone())
        moving.take()
        return
    with pytest.raises(RuntimeError, match="'table' was changed"):
        moving.take()


@pytest.mark.guarantee(
    "The trajectory",
    "A buffer that changes outside forward during a step is refused by name, and may change between steps.",
)
@pytest.mark.parametrize(
    "where", ["in backward", "in the loop", "in the loop, after the last one", "between steps"]
)
def test_buffer_change_after_forward_is_refused_inside_a_step_only(
    where: str,
) -> None:
    net = torch.nn.Linear(2, 2)
    net.register_buffer("center", torch.zeros(2))
    step = begin(World(), net)
    seen = 0

    def change(*_: Any) -> None:
        net.center.add_(1.0)  # type: ignore[operator, union-attr]

    if where == "in backward":
        net.register_full_backward_hook(change)

    def train() -> None:
        nonlocal seen
        for inputs in step.microbatches([torch.ones(3, 2, requires_grad=True)] * 3 * BATCH):
            step.backward(net(inputs).sum())
            seen += 1
            if where == "in the loop" or (where.endswith("last one") and seen == BATCH):
                change()
        if where == "between steps":
            change()

    if where == "between steps":
        for _ in range(3):
            train()
        assert (step.index, net.center.tolist()) == (3, [3.0, 3.0])  # type: ignore[operator, union-attr]
        return
    with pytest.raises(
        RuntimeError, match=r"'center' was changed after the forward pass .* buffers=\['center'\]"
    ):
        train()
    assert (step.index, seen) == (0, BATCH if where.endswith("last one") else 1)


class Follower(torch.nn.Module):
    """A module with a copy of its layer that follows the layer in every forward pass, as a momentum encoder does."""

    def __init__(self, follow: Any) -> None:
        super().__init__()
        self.query, self.key, self.follow = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), follow
        self.key.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.follow(self.key.weight, self.query.weight)
        return self.query(inputs) - self.key(inputs).detach()


def by_data(key: torch.Tensor, query: torch.Tensor) -> None:
    key.data = 0.9 * key.data + 0.1 * query.data


def in_place(key: torch.Tensor, query: torch.Tensor) -> None:
    key.mul_(0.9).add_(query, alpha=0.1)


def elsewhere(key: torch.Tensor, query: torch.Tensor) -> None:
    key.data = key.data.clone()  # the same numbers in other memory, as after offloading


@pytest.mark.guarantee("The trajectory", "A frozen parameter that changes inside a step is refused by name.")
@pytest.mark.parametrize("follow", [by_data, in_place, elsewhere])
def test_frozen_parameter_stays_unchanged_inside_a_step(follow: Any) -> None:
    net = Follower(follow)
    step = begin(World(), net)

    def train() -> None:
        with torch.no_grad():
            in_place(net.key.weight, net.query.weight)  # between two steps
        for inputs in step.microbatches([torch.ones(3, 2)] * 4 * BATCH):
            step.backward(net(inputs).square().sum())

    if follow is not elsewhere:
        with pytest.raises(
            RuntimeError, match=r"parameter 'key.weight' was changed .* change it between two steps"
        ):
            train()
        return
    for _ in range(3):
        train()
    assert step.index == 3


def test_invalid_weights_are_refused() -> None:
    one, three = torch.ones(()), torch.ones(3)
    assert weights_of(None, None, one, 1, exact=True) == [1.0]
    assert weights_of(None, [2.0, 3.0, 4.0], three, 3, exact=True) == [2.0, 3.0, 4.0]
    assert weights_of(2, None, one, 3, exact=False) == [2.0, 2.0, 2.0]
    assert weights_of(torch.tensor(5), None, one, 1, exact=True) == [5.0]
    assert weights_of(torch.tensor([5, 6, 7]), None, three, 3, exact=True) == [5.0, 6.0, 7.0]
    for given, ran_with, loss, count, exact, complaint in (
        ([1.0, 2.0], None, three, 3, False, "2 weights were given for 3"),
        (-1.0, None, one, 1, False, "0 or more"),
        (float("nan"), None, one, 1, False, "finite"),
        (2.0, [1.0, 1.0, 1.0], three, 3, False, "have run with weights"),
        (None, None, torch.ones(2), 3, False, "a loss of 2 values"),
        ([1.0, 2.0, 3.0], None, one, 3, False, "give one loss for each"),
        (0.5, None, one, 1, True, "whole numbers"),
    ):
        with pytest.raises(ValueError, match=complaint):
            weights_of(given, ran_with, loss, count, exact)


def test_round_losses_count_by_their_own_weights() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    weighted(losses, [1.0, 4.0, 0.0]).backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [1.0, 4.0, 0.0]
    for weights in ([1.0] * 3, [2.5] * 3):
        losses.grad = None
        weighted(losses, weights).backward()
        assert losses.grad.tolist() == weights
