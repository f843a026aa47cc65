"""Methods of gradient accumulation (such as `no_sync`) that have no effect under a step."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Ignored:
    """Replaces a method that holds gradients back until a later microbatch; as a context it does
    nothing, too.

    A death changes which microbatch is the last of a replica, so only the step can decide.
    """

    def __init__(self, name: str) -> None:
        self._name, self._said = name, False

    def __call__(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        if not self._said:
            self._said = True
            warnings.warn(
                f"{self._name}() does nothing under recover.Step, which decides when gradients are synchronised: after "
                "a death another microbatch is the last one; it can be left out",
                stacklevel=2,
            )
        return nullcontext()


def ignore(module: torch.nn.Module, method: str) -> None:
    """Replace this method of this module by one that does nothing, with one warning."""
    object.__setattr__(module, method, Ignored(method))
