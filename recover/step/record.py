"""What a rank tells the others after a repair: where it stands in the step and what it has in hand."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from recover.policy import Holding

_HEAD = struct.Struct("<Q????Q")


@dataclass(frozen=True)
class Record:
    step: int
    complete: (
        bool  # every bucket of the attempt was reduced: its results are the sum of exactly B microbatches
    )
    finite: bool  # if complete: the sum holds neither infinities nor NaNs, as far as this shard goes
    in_range: bool  # what this rank has summed can be summed as the reduction promises
    stop: bool  # somebody has asked this rank to stop after the step
    fingerprint: int  # of the parameters that this step started from
    holding: Holding

    def to_bytes(self) -> bytes:
        return (
            _HEAD.pack(self.step, self.complete, self.finite, self.in_range, self.stop, self.fingerprint)
            + self.holding.to_bytes()
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        step, complete, finite, in_range, stop, fingerprint = _HEAD.unpack_from(data)
        return cls(
            step, complete, finite, in_range, stop, fingerprint, Holding.from_bytes(data[_HEAD.size :])
        )
