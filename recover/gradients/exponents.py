"""The exponents of reproducible sums: how large values may become, and so the grid that they are
rounded to.

There is one exponent for each kind of value that is summed: all gradients, all losses (times their
weights), and each running buffer. Weights are whole numbers, whose sums are exact without one. A
value below 2^exponent can be summed over B microbatches without an error, on a grid of 53 bits. A
larger one is an overflow, and the step runs again with a larger exponent.

The exponents of a committed step are a pure function of the exponents before it and of the
maxima over all B microbatches of that step. Neither the number of replicas nor a death changes
them, so they do not change the bits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

# Kinds of values, by index; each running buffer is a kind of its own.
GRADIENTS, LOSSES, BUFFERS = 0, 1, 2
START = {GRADIENTS: 5, LOSSES: 13, BUFFERS: 13}  # until a committed step had a value other than zero
HEADROOM = 10  # a value may be 1,024 times the largest one of the last steps
WINDOW = 64  # steps
LOWEST = -60  # the grid of smaller gradients could not be reached by a float32 factor
BITS = 53  # of the integers that float64 holds

# One rerun is enough where kernels are deterministic: its maxima are the same again. Where they are
# not, no run repeats the bits of another, and after so many reruns an attempt is committed if it
# has no overflow.
RERUNS = 3

MANY_RERUNS = 10  # of 100 steps

# Codes of maxima: the least integer c with |value| < 2^c, or one of these.
ZERO = -(1 << 30)
NOT_FINITE = 1 << 30


def code_of(values: Iterable[float]) -> int:
    """The code of the largest magnitude among these."""
    largest = 0.0
    for value in values:
        if not math.isfinite(value):
            return NOT_FINITE
        largest = max(largest, abs(value))
    return math.frexp(largest)[1] if largest else ZERO


class Exponents:
    """Exponents of the current attempt, and the maxima of the last committed steps, from which the
    next exponents are computed."""

    def __init__(self, global_batch: int) -> None:
        # A sum of B integers below 2^53 / B is below 2^53.
        self._bits = BITS - math.ceil(math.log2(global_batch))
        self._start = [START[GRADIENTS], START[LOSSES]]
        self._window: deque[tuple[int, ...]] = deque(maxlen=WINDOW)
        self._reruns_of_steps: deque[int] = deque(maxlen=100)
        self._step: int | None = None
        self.begin(0)

    def add_buffers(self, count: int) -> None:
        """Add exponents for this number of running buffers."""
        self._start += [START[BUFFERS]] * count
        self._window.clear()
        self.begin(0)

    def begin(self, step: int) -> None:
        """A step begins. A step that was left and begins again keeps the exponents that were
        agreed on for it: other replicas may be running it with them."""
        if step == self._step and step:
            return
        self._step, self.reruns = step, 0
        self._proposed = tuple(map(self._following, range(len(self._start))))
        self.current = self._proposed

    def grid(self, kind: int) -> float:
        """The distance of two neighbouring values of this kind, a power of two."""
        return math.ldexp(1.0, self.current[kind] - self._bits)

    def required(self, maxima: Sequence[int]) -> tuple[int, ...]:
        """The exponents that this step requires, given the maxima over all of its microbatches."""
        return tuple(
            proposed if maximum <= proposed else maximum + HEADROOM
            for proposed, maximum in zip(self._proposed, maxima, strict=True)
        )

    def fit(self, maxima: Sequence[int]) -> bool:
        """Whether an attempt with the current exponents and these maxima may be committed."""
        if self.reruns < RERUNS:
            return self.required(maxima) == self.current
        return all(maximum <= exponent for maximum, exponent in zip(maxima, self.current, strict=True))

    def rerun(self, maxima: Sequence[int]) -> None:
        """All replicas have agreed that an attempt with these maxima does not fit."""
        self.reruns += 1
        self.current = self.required(maxima)

    def commit(self, maxima: Sequence[int]) -> None:
        """A step was committed, and not skipped."""
        self._window.append(tuple(maxima))
        self._reruns_of_steps.append(self.reruns)

    def take_warning(self) -> str:
        """A warning if steps are run again often; empty otherwise. It starts counting again
        afterwards."""
        often = sum(self._reruns_of_steps)
        if often <= MANY_RERUNS:
            return ""
        steps = len(self._reruns_of_steps)
        self._reruns_of_steps.clear()
        return (
            f"{often} reruns in the last {steps} steps: gradients or losses grow by more than {1 << HEADROOM} times "
            "from step to step. Lower the learning rate, clip gradients or look at the data; with reduction=fast there "
            "are no reruns"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"maxima": [list(maxima) for maxima in self._window]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        maxima = [tuple(map(int, each)) for each in state["maxima"]]
        if any(len(each) != len(self._start) for each in maxima):
            raise ValueError(
                f"the saved state of reduction='reproducible' has {len(maxima[0])} exponents, and this model needs "
                f"{len(self._start)} (one for gradients, one for losses, one for each running buffer); resume with the "
                "model that it was saved with"
            )
        self._window = deque(maxima, maxlen=WINDOW)
        self._step = None
        self.begin(0)

    def _following(self, kind: int) -> int:
        largest = max((maxima[kind] for maxima in self._window), default=ZERO)
        return self._start[kind] if largest == ZERO else max(LOWEST, largest + HEADROOM)
