"""Grids that fit, and gradients that several ranks of a replica share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_threed import config_of

from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.reduction import ReproducibleSum
from recover.gradients.replica_interface import PlainReplica, Sharing
from recover.parallel.partition import ModelCut


class Doubling:
    """A partner that has computed the same parts as this rank."""

    size = 2

    def add_up(self, sums: torch.Tensor) -> None:
        sums.mul_(2)


class SharedReplica(PlainReplica):
    """A replica in which two ranks hold the first parameter."""

    def __init__(self, shared: torch.nn.Parameter) -> None:
        self._shared, self._sharing = shared, Sharing(copies=2, partners=Doubling())

    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        return self._sharing if parameter is self._shared else Sharing()


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Gradients shared by ranks are added once per round, and each part counts as the largest possible sum.",
)
@pytest.mark.parametrize("exact", [False, True])
def test_shared_gradient_parts_are_added_once_per_round(exact: bool) -> None:
    """Tested over two rounds and a repeated reduction; a new step begins with empty buckets."""
    shared, own = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    total = ReproducibleSum(8) if exact else None
    gradients = OwnedGradients([shared, own], bucket_mb=1, sum=total, replica=SharedReplica(shared))
    (unit, _) = gradients.sum.units([1, 2])
    posted: list[list[float]] = []
    assert [bucket.copies for bucket in gradients.buckets] == [1, 2]
    for _ in range(2):
        gradients.begin()
        for values in ([1.0, 2.0], [4.0]):  # the microbatches of two rounds
            gradients.expect(None)
            for value in values:
                (value * (shared + own).sum()).backward()
            gradients.collect()
        for _ in range(2):
            posted.clear()
            gradients.post_all(lambda index, bucket: posted.append((bucket.local * unit).tolist()))
            assert posted == [[7.0] * 3, [14.0] * 3]
            gradients.rewind(overlapped=False)


def test_shared_parameter_without_gradient_counts_as_zero() -> None:
    """A replica that has run nothing in this attempt posts zeros, and no values of an earlier step."""
    shared, own = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    gradients = OwnedGradients([shared, own], bucket_mb=1, replica=SharedReplica(shared))
    for bucket in gradients.buckets:
        bucket.local.fill_(7.0)
    gradients.begin()
    posted: list[float] = []
    gradients.post_all(lambda index, bucket: posted.extend(bucket.local.tolist()))
    assert posted == [0.0] * 6


@pytest.mark.parametrize("turned", [False, True])
def test_partners_reduce_buckets_of_clipped_groups_in_one_order(turned: bool) -> None:
    """The order does not depend on the order in which a rank of the pipeline holds them: otherwise partners would add
    up different buckets."""
    one, two, own = (torch.nn.Parameter(torch.zeros(size)) for size in (2, 3, 4))
    replica = SharedReplica(one)
    sharing = replica.sharing(one)
    replica.sharing = lambda parameter: Sharing() if parameter is own else sharing  # type: ignore[method-assign]
    held = [one, own, two] if turned else [two, own, one]
    gradients = OwnedGradients(
        held, bucket_mb=1, replica=replica, parts=2, part_of=lambda: {one: 1, two: 0, own: 1}
    )
    found = [(bucket.part, bucket.copies, bucket.local.numel()) for bucket in gradients.buckets]
    assert found == [(1, 1, 4), (0, 2, 3), (1, 2, 2)]


class Busy:
    """A partner that has used all parameters, and adds ones."""

    size = 2

    def add_up(self, sums: torch.Tensor) -> None:
        sums += 1


@pytest.mark.guarantee(
    "Trained parameters", "A parameter shared by ranks of a grid is used if any of them has used it."
)
def test_shared_parameter_is_used_if_any_partner_used_it() -> None:
    shared, own = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    replica = SharedReplica(shared)
    replica._sharing = Sharing(copies=2, partners=Busy())
    gradients = OwnedGradients([shared, own], bucket_mb=1, replica=replica)
    gradients.begin()
    assert gradients.usage == [0, 0]
    gradients.expect(None)
    gradients.collect()
    assert gradients.usage == [1, 0]
    gradients.post_all(lambda index, bucket: bucket.result.copy_(bucket.local))
    gradients.install(1.0, [1.0], gradients.usage)
    assert shared.grad.tolist() == [1.0] * 3
    assert own.grad is None
    gradients.begin()
    assert gradients.usage == [0, 0]


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Gradients shared by ranks are added once per round, and each part counts as the largest possible sum.",
)
def test_shared_gradient_part_counts_as_the_largest_possible_sum() -> None:
    """Two partners add up their parts: each part counts twice."""
    shared, own = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    total = ReproducibleSum(8)
    gradients = OwnedGradients([shared, own], bucket_mb=1, sum=total, replica=SharedReplica(shared))
    for parameter, parts, expected in ((own, 1, [0, 0, 0.75]), (shared, 2, [0, 1.5])):
        gradients.begin()
        gradients.expect(None)
        (0.75 * parameter.sum()).backward()
        gradients.collect()
        assert gradients.largest.tolist() == expected, parts


@pytest.mark.parametrize(
    ("shape", "size", "complaint"),
    [
        ({"tp": 0}, 1, "tp=0 must be at least 1"),
        ({"pp": 2, "schedule": "2f2b"}, 2, "schedule='2f2b' is not known; choose one of '1f1b'"),
        ({"tp": 2, "pp": 2}, 2, "makes 4 ranks, and a replica has 2; make replicas of 4 ranks"),
        ({"ep": 4}, 2, "expert groups would span replicas, and the loss of one would stop the others"),
        ({"tp": 4}, 4, "kv_heads 2 of the model is not a multiple of tp=4"),
        ({"pp": 4}, 4, "2 layer\\(s\\) cannot be cut into 4 stages"),
        ({"pp": 2, "schedule": "interleaved"}, 2, "2 layer\\(s\\) cannot be cut into 4 stages"),
        ({"ep": 2}, 2, "the model has 0 experts, which cannot be shared among ep=2 ranks"),
        ({"tp": 2, "dropout": 0.1}, 2, "dropout=0.1 is not supported with tp=2"),
    ],
)
def test_grid_that_does_not_fit_is_refused(shape: dict[str, Any], size: int, complaint: str) -> None:
    def check() -> None:
        model = config_of({"dropout": shape.pop("dropout", 0.0)})
        grid = ModelCut(**shape)
        grid.check_ranks(size)
        grid.check_model(model)

    with pytest.raises(ValueError, match=complaint):
        check()
