"""Census records: what each rank sends to the others in a repair."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from recover.policy import Holding
from recover.world.census import ARRIVAL, is_arrival

_HEAD = struct.Struct("<Q?????HQQ?H?II")


@dataclass(frozen=True)
class Record:
    """The record of a member: its position in the step, and what it holds."""

    step: int
    complete: bool  # all buckets of the attempt were reduced: they hold exactly B microbatches
    finite: bool  # if complete: the sum of this shard holds neither infinities nor NaNs
    in_range: bool  # if complete: summed with the exponents that its values require
    stop: bool  # this rank was asked to stop after the step
    leaves: bool  # this rank was asked to leave after the step, alone
    asked: int  # replicas that this rank sees asking to join, as bits
    fingerprint: int  # of the state that this step began with
    since: int  # the step before which its replica joined; 0: at the beginning of the run
    counts: bool  # whether its replica counts when a majority decides which state is right
    # If the reduced sums of this attempt are wrong on this rank: how often they were in this step.
    wrong_sums: int
    damaged: bool  # its local sums do not hold what was added to them
    holding: Holding
    # Answers to the questions after a vote has found different state (`recover.step.difference`).
    answer: bytes = b""
    # Results of verified slots (`recover.step.verification`); empty where nothing is verified.
    evidence: bytes = b""

    def to_bytes(self) -> bytes:
        return (
            _HEAD.pack(
                self.step,
                self.complete,
                self.finite,
                self.in_range,
                self.stop,
                self.leaves,
                self.asked,
                self.fingerprint,
                self.since,
                self.counts,
                self.wrong_sums,
                self.damaged,
                len(self.answer),
                len(self.evidence),
            )
            + self.answer
            + self.evidence
            + self.holding.to_bytes()
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        *head, answered, proved = _HEAD.unpack_from(data)
        answer, rest = data[_HEAD.size : _HEAD.size + answered], data[_HEAD.size + answered :]
        fields = [*head, Holding.from_bytes(rest[proved:]), answer, rest[:proved]]
        return cls(*fields)


@dataclass(frozen=True)
class Arrival:
    """The record of a joining rank, which does not hold the state, or not all of it."""

    host: str
    warm_up: float  # seconds from the start of its process until it asked to join
    failures: int = 0  # transfers of the state in a row that failed
    complete: bool = False  # it holds the sums of the attempt that it took part in last
    ready: bool = False  # it holds all that is handed over in instalments
    holds: str = ""  # numbers of the entries that it holds, as hexadecimal bits

    def to_bytes(self) -> bytes:
        return ARRIVAL + json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Arrival:
        return cls(**json.loads(data.removeprefix(ARRIVAL)))

    @staticmethod
    def is_in(data: bytes) -> bool:
        return is_arrival(data)


def arrivals_of(records: Mapping[int, bytes]) -> dict[int, Arrival]:
    """The joining ranks in a census, with their records."""
    return {rank: Arrival.from_bytes(data) for rank, data in records.items() if is_arrival(data)}
