"""The state that must be equal on all replicas: as one fingerprint for the vote, and entry by
entry once a vote has found a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recover.gradients.deferred import DeviceValue, fetch
from recover.gradients.exponents import Exponents
from recover.gradients.optimizers import optimizers_of, parameters_of
from recover.gradients.running_buffers import RunningBuffers
from recover.gradients.state_hash import StateHash, fingerprint, leaves, settings, shown
from recover.step.difference import Digest, StateKind
from recover.step.model_checks import ModelAndOptimizer


@dataclass(frozen=True)
class Entry:
    """One tensor or value of the state, under the name that a user knows."""

    kind: StateKind
    name: str
    value: Any


class ComparedState:
    """Model, optimizer, scheduler and extras of one rank. `extra` is called when needed: users
    add entries."""

    def __init__(
        self,
        model_and_optimizer: ModelAndOptimizer,
        optimizer: Any,
        buffers: RunningBuffers,
        scheduler: Any,
        extra: Callable[[], Mapping[str, Any]],
        exponents: Exponents | None = None,
    ) -> None:
        """`exponents`: of reproducible sums."""
        self._model_and_optimizer, self._optimizer, self._buffers = model_and_optimizer, optimizer, buffers
        self._scheduler, self._extra, self._exponents = scheduler, extra, exponents
        # 128 bits over this rank's parameters, from the last fingerprint that was read.
        self.parameters_digest = bytes(16)

    def fingerprint(self, number: int, full: bool, more: bytes = b"") -> DeviceValue[int]:
        """Fingerprint before step `number`, of parameters, running buffers and the optimizer's
        settings.

        full:  cover all entries
        more:  bytes that enter it, too

        Buffers and extras are hashed now, since the step's microbatches may change them;
        parameters and optimizer state when the value is read, at the vote: until then nothing
        changes them, and the device is not kept waiting.
        """
        options = settings(self._optimizer)
        around = [*self._scheduler_entries(), *self._extra_entries()] if full else []
        state = list(self._optimizer_entries()) if full else []
        later = [value for group in options for _, value in group if isinstance(value, torch.Tensor)]
        numbers = [
            [option for option in group if not isinstance(option[1], torch.Tensor)] for group in options
        ]
        values = [(entry.name, entry.value) for entry in (*around, *state)]
        # As one text: this runs in every step, and hashing each number alone is slower.
        whole = StateHash(
            number, self._model_and_optimizer.trained + more, (repr(numbers), self._maxima(), values)
        )
        whole.add(self._buffers.tensors())
        whole.add(_tensors(around))
        return whole.value(
            lambda: [*later, *_tensors(state)], self._model_and_optimizer.parameters, self._learn_digest
        )

    def _learn_digest(self, digest: bytes) -> None:
        self.parameters_digest = digest

    def digests(self) -> list[Digest]:
        """Digests of all entries, causes before their effects: differences are looked for in
        this order."""
        entries = list(self._entries())
        found = [
            fingerprint([entry.value], 0) if isinstance(entry.value, torch.Tensor) else None
            for entry in entries
        ]
        fetch(found)
        return [
            Digest(entry.kind, entry.name, shown(entry.value))
            if value is None
            else Digest(entry.kind, entry.name, f"{value.value:016x}", is_tensor=True)
            for entry, value in zip(entries, found, strict=True)
        ]

    def _maxima(self) -> str:
        """The maxima from which the exponents of the next step follow."""
        return self._exponents.digest_of_history if self._exponents is not None else ""

    def _entries(self) -> Iterator[Entry]:
        for number, group in enumerate(settings(self._optimizer)):
            where = f" of parameter group {number}" if number else ""
            for name, value in group:
                yield Entry(StateKind.SETTING, f"{_SPOKEN.get(name, name)}{where}", _number(value))
        if self._exponents is not None:
            yield Entry(
                StateKind.SETTING, "maxima of the last steps, from which exponents follow", self._maxima()
            )
        yield from self._scheduler_entries()
        of = self._model_and_optimizer.names()
        names = [(of[parameter], parameter) for parameter in self._model_and_optimizer.parameters()]
        for name, parameter in names:
            yield Entry(StateKind.TRAINED, name, parameter.requires_grad)
        for name, parameter in names:
            yield Entry(StateKind.PARAMETER, name, parameter)
        for name, buffer in self._buffers.at_start():
            yield Entry(StateKind.BUFFER, name, buffer)
        yield from self._optimizer_entries()
        yield from self._extra_entries()

    def _optimizer_entries(self) -> Iterator[Entry]:
        """Of each optimizer the state of each parameter, then state that belongs to no parameter."""
        names = self._model_and_optimizer.names()
        for optimizer in optimizers_of(self._optimizer):
            held = parameters_of(optimizer)
            for parameter in held:
                if parameter in optimizer.state:
                    for path, value in leaves(optimizer.state[parameter]):
                        yield Entry(StateKind.OPTIMIZER, f"{_dotted(path)} of {names[parameter]}", value)
            known = set(held)
            others = {str(key): value for key, value in optimizer.state.items() if key not in known}
            for path, value in leaves(others):
                yield Entry(StateKind.OPTIMIZER, _dotted(path), value)

    def _scheduler_entries(self) -> Iterator[Entry]:
        if hasattr(self._scheduler, "state_dict"):
            for path, value in leaves(self._scheduler.state_dict()):
                yield Entry(StateKind.SCHEDULER, _dotted(path), value)

    def _extra_entries(self) -> Iterator[Entry]:
        for name, value in sorted(self._extra().items()):
            if not getattr(value, "differs_between_replicas", False):
                state = value.state_dict() if hasattr(value, "state_dict") else value
                for path, leaf in leaves(state):
                    yield Entry(StateKind.EXTRA, _dotted((name, *path)), leaf)


_SPOKEN = {"lr": "learning rate", "weight_decay": "weight decay"}


def _tensors(entries: Iterable[Entry]) -> list[torch.Tensor]:
    return [entry.value for entry in entries if isinstance(entry.value, torch.Tensor)]


def _number(value: Any) -> Any:
    """A tensor of one element as a number, so that a message can show it."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
