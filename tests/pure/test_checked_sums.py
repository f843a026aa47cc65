"""Checksums of exact sums: linear in the words, and different if a word was changed, moved, lost or added twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.reduction import make_sum
from recover.gradients.replica_interface import PlainReplica, Sharing
from recover.gradients.word_checksum import LOW
from recover.job.grid import Grid
from recover.policy import Holding, Role, SlotSet
from recover.step.record import Record
from recover.step.sum_check import TRIES, judge
from recover.step.totals import Totals

SHAPES = ((70_000,), (5, 33), (3,), (1,))  # the first one is added in several pieces
BATCH = 8
WORDS = pytest.mark.parametrize("bits", [64, 32])


def gradients_of(
    bits: int, bucket_mb: float = 0.1, replica: PlainReplica | None = None
) -> tuple[OwnedGradients, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    names = {parameter: f"p{number}" for number, parameter in enumerate(parameters)}
    made = OwnedGradients(
        parameters,
        bucket_mb,
        make_sum("reproducible", BATCH, bits),
        replica or PlainReplica(),
        names.copy,
        with_checksums=True,
    )
    made.begin()
    return made, parameters


def run(gradients: OwnedGradients, parameters: Sequence[torch.nn.Parameter], slot: int, seed: int) -> None:
    """Run a microbatch. Some parameters get no gradient."""
    torch.manual_seed(seed)
    gradients.expect(None, SlotSet.span(slot, slot + 1))
    used = [p for number, p in enumerate(parameters) if (seed + number) % 3]
    sum((parameter * torch.randn_like(parameter)).sum() for parameter in used).backward()  # type: ignore[union-attr]
    gradients.collect()


def complete(gradients: OwnedGradients) -> int:
    """Reduce the sums of a single replica. Returns the checksum of all gradients that were added."""
    gradients.post_all(lambda index, bucket: bucket.result.copy_(bucket.local))
    return gradients.checksum_added.value


@WORDS
def test_checksum_of_a_sum_is_the_sum_of_the_checksums(bits: int) -> None:
    """This holds over microbatches, over replicas, and for any packing of parameters into buckets."""
    replicas = [gradients_of(bits, bucket_mb) for bucket_mb in (0.1, 0.1, 0.1)]
    for number, (gradients, parameters) in enumerate(replicas):
        for slot in range(number):  # one of the replicas has run nothing
            run(gradients, parameters, slot, 10 * number + slot)
    added = sum(complete(gradients) for gradients, _ in replicas) & LOW
    first = replicas[0][0]
    for index, bucket in enumerate(first.buckets):
        bucket.result.copy_(sum(gradients.buckets[index].local for gradients, _ in replicas))
    assert first.checksum_of("result") == added != 0
    for gradients, _ in replicas:
        assert gradients.checksum_of("local") == gradients.checksum_added.value
    one_bucket, parameters = gradients_of(bits, 25.0)
    for number in range(3):
        for slot in range(number):
            run(one_bucket, parameters, 3 * number + slot, 10 * number + slot)
    assert complete(one_bucket) == one_bucket.checksum_of("result") == added
    one_bucket.clear()
    assert one_bucket.checksum_added.value == 0


@pytest.mark.guarantee(
    "Verified gradients",
    "Any flipped bit of a word, and exchanged, lost or repeated words, change the checksum of a sum.",
)
@WORDS
def test_any_change_of_a_sum_changes_its_checksum(bits: int) -> None:
    gradients, parameters = gradients_of(bits)
    for slot in range(3):
        run(gradients, parameters, slot, slot)
    added = complete(gradients)
    results = [bucket.result for bucket in gradients.buckets]
    whole = [result.clone() for result in results]
    rng = random.Random(bits)

    def found() -> bool:
        answer = gradients.checksum_of("result") != added
        for result, before in zip(results, whole, strict=True):
            result.copy_(before)
        return answer

    assert not found()
    kind = torch.int64 if bits == 64 else torch.int32
    for bit in range(bits):
        result = rng.choice(results)
        at = rng.choice(result.nonzero().view(-1).tolist())
        flipped = 1 << bit if bit < bits - 1 else -(1 << bit)
        result.view(kind)[at] ^= flipped
        assert found(), f"bit {bit} of word {at}"
    large = max(results, key=torch.numel)
    for _ in range(100):
        one, other = rng.sample(range(large.numel()), 2)
        if large[one] == large[other]:
            continue
        large[one], large[other] = large[other].item(), large[one].item()
        assert found(), f"words {one} and {other} exchanged"
        start, size = rng.randrange(large.numel()), rng.choice((1, 100, 4096, 65536))
        before = next(each for each, result in zip(whole, results, strict=True) if result is large)
        large[start : start + size] = 0
        lost = bool(before[start : start + size].any())
        assert found() == lost, f"{size} words lost from {start} on"
        large[start : start + size] *= 2
        assert found() == lost, f"{size} words added twice from {start} on"
    large[0] = float("nan") if bits == 64 else -(1 << 31)
    assert found()


class Pair(PlainReplica):
    """A rank whose partner has computed the same; with `spoils`, the sum of both gets a wrong bit."""

    size = 2

    def __init__(self) -> None:
        self.spoils = False

    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        return Sharing(copies=2, partners=self)  # type: ignore[arg-type]

    def add_up(self, sums: torch.Tensor) -> None:
        sums.mul_(2)
        if self.spoils:
            sums[0] += 1


@WORDS
def test_checksum_covers_gradients_that_ranks_of_a_replica_add_up(bits: int) -> None:
    for spoils in (False, True):
        pair = Pair()
        gradients, parameters = gradients_of(bits, replica=pair)
        pair.spoils = spoils
        for slot in range(3):
            run(gradients, parameters, slot, slot)
        assert (gradients.checksum_of("local") == gradients.checksum_added.value) is not spoils
    alone, parameters = gradients_of(bits)
    for slot in range(3):
        run(alone, parameters, slot, slot)
    assert (complete(gradients) - 2 * complete(alone)) & LOW == 0


def test_totals_add_up_checksums_modulo_2_to_the_64() -> None:
    values = [LOW, LOW - 5, 1 << 63, 12345678901234567890]
    rows = []
    for replica, value in enumerate(values):
        totals = Totals(4, range(4), 0, 1, with_checksum=True)
        totals.begin(3)
        totals.say(7, replica)
        totals.say_checksum(value)
        rows.append(totals._own.copy())
    totals._sum[:] = sum(rows)
    totals.agree(totals.rows_of_replica())
    assert totals.checksum == sum(values) & LOW
    assert totals.same_state(4)


RECORD = Record(
    step=3,
    complete=True,
    finite=True,
    in_range=True,
    stop=False,
    leaves=False,
    asked=0,
    fingerprint=1,
    since=0,
    counts=True,
    wrong_sums=0,
    damaged=False,
    holding=Holding(0, Role.MAJOR, SlotSet(), True),
)


@pytest.mark.parametrize(
    ("wrong", "damaged", "evicted", "error"),
    [
        ({}, (), {}, ""),
        ({1: 1}, (), {}, ""),  # the sum is reduced again
        (dict.fromkeys(range(6), TRIES - 1), (), {}, ""),
        ({0: 1, 2: 1, 4: 1, 3: 0}, (2,), {1: "does not hold what was added to it (rank 2)"}, ""),
        (dict.fromkeys(range(6), 1), (2, 3, 5), {1: "(rank 2, rank 3)", 2: "(rank 5)"}, ""),
        ({3: TRIES}, (), {1: f"wrong after {TRIES} reductions, and that of others was right (rank 3)"}, ""),
        ({2: TRIES, 3: TRIES, 0: 1}, (), {1: "(rank 2, rank 3)"}, ""),
        ({1: TRIES, 3: TRIES}, (), {}, "reduced sums of replicas 0, 1 were wrong"),
        (dict.fromkeys(range(6), 1), (0, 2, 4), {}, "no replica is left whose sums are right"),
    ],
)
def test_verdict_on_wrong_sums_names_the_replica_that_erred(
    wrong: dict[int, int], damaged: tuple[int, ...], evicted: dict[int, str], error: str
) -> None:
    """The job has three replicas of two ranks."""
    records = {
        rank: replace(RECORD, wrong_sums=wrong.get(rank, 0), damaged=rank in damaged) for rank in range(6)
    }
    assert Record.from_bytes(records[0].to_bytes()) == records[0]
    verdict = judge(Grid(3, 2), records)
    assert verdict.evicted.keys() == evicted.keys()
    assert all(why in verdict.evicted[replica] for replica, why in evicted.items())
    assert error in verdict.error
    assert bool(error) == bool(verdict.error)
