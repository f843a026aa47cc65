"""What a rank tells the others after a repair: where it stands in the step and what it has in hand."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass

from recover.policy import Holding

_HEAD = struct.Struct("<Q????HQQ?I")
_ARRIVAL = b"\xff" * 8  # where others name their step: none has this number


@dataclass(frozen=True)
class Record:
    step: int
    complete: (
        bool  # every bucket of the attempt was reduced: its results are the sum of exactly B microbatches
    )
    finite: bool  # if complete: the sum holds neither infinities nor NaNs, as far as this shard goes
    in_range: bool  # if complete: the sum was made with the exponents that its values require
    stop: bool  # somebody has asked this rank to stop after the step
    asked: int  # the replicas that this rank sees asking to join, as bits
    fingerprint: int  # of the parameters that this step started from
    since: int  # the step before which its replica joined; 0: it was there when the run began
    counts: bool  # its replica has a say in which state is right
    holding: Holding
    answer: bytes = (
        b""  # to what the others ask after a vote has found different state (`recover.step.difference`)
    )

    def to_bytes(self) -> bytes:
        return (
            _HEAD.pack(
                self.step,
                self.complete,
                self.finite,
                self.in_range,
                self.stop,
                self.asked,
                self.fingerprint,
                self.since,
                self.counts,
                len(self.answer),
            )
            + self.answer
            + self.holding.to_bytes()
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        (step, complete, finite, in_range, stop, asked, fingerprint, since, counts, length) = (
            _HEAD.unpack_from(data)
        )
        answer, rest = data[_HEAD.size : _HEAD.size + length], data[_HEAD.size + length :]
        holding = Holding.from_bytes(rest)
        return cls(step, complete, finite, in_range, stop, asked, fingerprint, since, counts, holding, answer)


@dataclass(frozen=True)
class Arrival:
    """What one that joins says instead: it is in no step, and holds no state yet."""

    host: str
    warm_up: float  # seconds from the start of its process until it asked
    failures: int = 0  # tries in a row to take the state that came to nothing

    def to_bytes(self) -> bytes:
        return _ARRIVAL + json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Arrival:
        return cls(**json.loads(data.removeprefix(_ARRIVAL)))

    @staticmethod
    def is_in(data: bytes) -> bool:
        return data.startswith(_ARRIVAL)
