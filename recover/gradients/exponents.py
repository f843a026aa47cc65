"""The exponents of reproducible sums: how large values may become, and so the grid that they are
rounded to.

Each kind of value has an exponent of its own: the losses (times their weights), the gradient of
each parameter, and each running buffer. Weights are whole numbers, whose sums are exact without
an exponent. A value below 2^exponent can be summed over B microbatches without an error, on a grid of as
many bits as the words of the sum hold. A larger one is an overflow, and the step runs again with a
larger exponent.

The exponents of a committed step are a pure function of the exponents before it and of the
maxima over all B microbatches of that step. Neither the number of replicas, nor a death, nor how
parameters are packed into buckets or sharded over ranks changes them, so none of that changes the
bits.

The grid of a value is at most 2^-21 of the largest one of its kind in this step or the last ones,
so the mean of B roundings is off by at most 2^-22 of it. Where ranks of a replica add up parts of a
gradient, the largest one is the number of parts times the largest part, and each part is rounded.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Exponents until a committed step had a value other than zero.
START = {"losses": 13, "parameters": 5, "buffers": 13}
LOSSES = 0  # index of the exponent of losses; those of parameters follow, then those of buffers
HEADROOM = 10  # a value may be 1,024 times the largest one of the last steps, where words allow it
WINDOW = 64  # steps
LOWEST = -60  # the grid of smaller gradients could not be reached by a float32 factor
PRECISION = 22  # an error of at most 2^-22 of the largest value

# Bits of the integers in a sum: of 64-bit words, a float64 holds 53; of 32-bit words, one is the sign.
BITS = {64: 53, 32: 31}
LEAST_HEADROOM = 1  # below it, small changes of the largest gradient would run steps again

# One rerun is enough if kernels are deterministic: its maxima are the same again. If they are not, no
# run repeats the bits of another, and after this number of reruns an attempt is committed if it has no
# overflow.
RERUNS = 3

MANY_RERUNS = 10  # of 100 steps

# Codes of maxima: the least integer c with |value| < 2^c, or one of these.
ZERO = -(1 << 30)
NOT_FINITE = 1 << 30
# A value so near to 2^c has the code c + 1: B of them, each rounded up to 2^c, could otherwise sum
# up to 2^31, which a 32-bit word does not hold.
NEAR = 2.0**-16

Codes = npt.NDArray[np.int32]


def codes_of(values: npt.ArrayLike) -> Codes:
    """The code of the magnitude of each of these."""
    magnitudes = np.abs(np.asarray(values, np.float64))
    mantissas, codes = np.frexp(magnitudes)
    codes = codes + (mantissas > 1.0 - NEAR)
    return np.where(np.isfinite(magnitudes), np.where(magnitudes > 0, codes, ZERO), NOT_FINITE).astype(
        np.int32
    )


def code_of(values: Iterable[float]) -> int:
    """The code of the largest magnitude among these."""
    return int(codes_of(list(values)).max(initial=ZERO))


def refuse_batch(global_batch: int, words: int) -> None:
    """Raises ValueError if words of `words` bits would leave less than the least headroom."""
    largest = 1 << BITS[words] - PRECISION - LEAST_HEADROOM
    if global_batch > largest:
        raise ValueError(
            f"global_batch={global_batch} is too large for sums in words of {words} bits, which have room for the "
            f"gradients of {largest} microbatches; use reduction_bits=64"
        )


class Exponents:
    """Exponents of the current attempt, and the maxima of the last committed steps, from which the
    next exponents are computed.

    `words`: bits of the words in which gradients are summed. Losses and buffers are summed with
    the totals, in words of 64 bits.
    """

    def __init__(self, global_batch: int, parameters: Sequence[str] = (), words: int = 64) -> None:
        refuse_batch(global_batch, words)
        # A sum of B integers below 2^n / B is below 2^n.
        self._bits_of = {n: bits - math.ceil(math.log2(global_batch)) for n, bits in BITS.items()}
        self._words = words
        self._reruns_of_steps: deque[int] = deque(maxlen=100)
        self._names: dict[str, list[str]] = {"losses": [""], "parameters": [], "buffers": []}
        self._lay_out({})
        self.name("parameters", parameters)

    def name(self, family: str, names: Sequence[str]) -> None:
        """Name the parameters, or the running buffers, in the order of their exponents. Maxima
        that are known under one of these names are kept."""
        if self._names[family] != list(names):
            known = self.state_dict()
            self._names[family] = list(names)
            self._lay_out(known)

    def _lay_out(self, known: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Begin with what is known of each kind of value, in the form of `state_dict`."""
        keys = [(family, name) for family, names in self._names.items() for name in names]
        history = [known.get(family, {}).get(name, (ZERO, ZERO, 0)) for family, name in keys]
        self._recent, self._before, self._steps = np.array(history, np.int32).T.copy()
        bits = [self._bits_of[self._words if family == "parameters" else 64] for family, _ in keys]
        self._bits = np.array(bits, np.int32)
        self._headroom = np.clip(self._bits - PRECISION, 0, HEADROOM).astype(np.int32)
        self._start = np.array([START[family] for family, _ in keys], np.int32)
        self._step: int | None = None
        self.begin(0)

    @property
    def size(self) -> int:
        return len(self._start)

    def index_of(self, family: str) -> dict[str, int]:
        """The index of the exponent of each parameter, or of each running buffer, by its name."""
        first = 1 if family == "parameters" else 1 + len(self._names["parameters"])
        return {name: first + number for number, name in enumerate(self._names[family])}

    def begin(self, step: int) -> None:
        """Begin a step. A step that was left and begins again keeps the exponents that were
        agreed on for it: other replicas may be running it with them."""
        if step == self._step and step:
            return
        self._step, self.reruns = step, 0
        largest = np.maximum(self._recent, self._before)
        is_new = largest == ZERO
        self._proposed = np.where(is_new, self._start, np.maximum(LOWEST, largest + self._headroom))
        # Without a step before, the proposed exponent is a guess: values may be too small for it, too.
        self._least = np.where(is_new, self._proposed - self._bits + PRECISION, ZERO)
        self._set(self._proposed)

    def _set(self, exponents: Codes) -> None:
        self.current: Codes = exponents.astype(np.int32)
        # The distance of two neighbouring values of each kind, a power of two.
        self.grids = np.ldexp(1.0, self.current - self._bits)

    @property
    def digest(self) -> list[int]:
        """The current grids as two numbers of 31 bits, equal on all ranks that round alike."""
        found = hashlib.blake2b(self.grids.tobytes(), digest_size=8).digest()
        return [int.from_bytes(part, "little") >> 1 for part in (found[:4], found[4:])]

    @property
    def digest_of_history(self) -> str:
        """A digest of all that determines the exponents of the next step."""
        history = np.stack([self._recent, self._before, self._steps]).astype(np.int32)
        return hashlib.blake2b(history.tobytes(), digest_size=16).hexdigest()

    def required(self, maxima: npt.ArrayLike) -> Codes:
        """The exponents that this step requires, given the maxima over all of its microbatches."""
        maxima = np.asarray(maxima, np.int32)
        fit = (maxima <= self._proposed) & ((maxima >= self._least) | (maxima == ZERO))
        return np.where(fit, self._proposed, np.maximum(LOWEST, maxima + self._headroom))

    def fit(self, maxima: npt.ArrayLike) -> bool:
        """Whether an attempt with the current exponents and these maxima may be committed."""
        if self.reruns < RERUNS:
            return bool((self.required(maxima) == self.current).all())
        return bool((np.asarray(maxima) <= self.current).all())

    def rerun(self, maxima: npt.ArrayLike) -> None:
        """Set the exponents that these maxima require: all replicas have agreed that an attempt with them
        does not fit."""
        self.reruns += 1
        self._set(self.required(maxima))

    def adopt(self, exponents: npt.ArrayLike) -> None:
        """Continue with exponents that the members have agreed on: for a joining replica, which takes no
        part in the agreement."""
        self._set(np.asarray(exponents, np.int32))

    def commit(self, maxima: npt.ArrayLike) -> None:
        """Note the maxima of a step that was committed, and not skipped. A kind without a value other
        than zero in it keeps its maxima, however long it is not used."""
        maxima = np.asarray(maxima, np.int32)
        self._recent = np.maximum(self._recent, maxima)
        self._steps = self._steps + (maxima != ZERO)
        full = self._steps >= WINDOW
        self._before = np.where(full, self._recent, self._before)
        self._recent = np.where(full, ZERO, self._recent)
        self._steps = np.where(full, 0, self._steps)
        self._reruns_of_steps.append(self.reruns)

    def take_warning(self) -> str:
        """A warning if steps are run again often; empty otherwise. It starts counting again
        afterwards."""
        often = sum(self._reruns_of_steps)
        if often <= MANY_RERUNS:
            return ""
        steps = len(self._reruns_of_steps)
        self._reruns_of_steps.clear()
        least = 1 << int(self._headroom.min())
        wider = "; reduction_bits=64 allows for 1,024 times" if self._words < 64 else ""
        return (
            f"{often} reruns in the last {steps} steps: gradients or losses grow by more than {least:,} times "
            "from step to step. Lower the learning rate, clip gradients or look at the data; with reduction=fast there "
            f"are no reruns{wider}"
        )

    def state_dict(self) -> dict[str, dict[str, list[int]]]:
        """For each kind of value: the largest maximum since the last full window, that of the last
        full window, and the number of steps since."""
        history = iter(np.stack([self._recent, self._before, self._steps], axis=1).tolist())
        return {family: {name: next(history) for name in names} for family, names in self._names.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved maxima. Kinds that the state does not have begin as in the first step."""
        self._lay_out(self._of_one_exponent(state["maxima"]) if "maxima" in state else state)

    def _of_one_exponent(self, rows: Sequence[Sequence[int]]) -> dict[str, dict[str, list[int]]]:
        """The state that version 0.1 has saved: the maxima of each of the last steps, of all
        gradients together, of losses and of the buffers. The maxima of all gradients together are
        dropped: they say nothing about one parameter."""
        if not rows:
            return {}
        buffers = self._names["buffers"]
        if any(len(row) != 2 + len(buffers) for row in rows):
            raise ValueError(
                f"the saved state of reduction='reproducible' has {len(rows[0]) - 2} running buffers, and this model "
                f"has {len(buffers)}; resume with the model that it was saved with"
            )
        _, losses, *others = ([ZERO, max(column), 0] for column in zip(*rows, strict=True))
        return {"losses": {"": losses}, "buffers": dict(zip(buffers, others, strict=True))}
