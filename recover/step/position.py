"""Arguments of a step, and the position of a run, for runs that resume and for joining replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from recover.gradients.exponents import BITS, Exponents, refuse_batch
from recover.gradients.optimizers import optimizers_of
from recover.gradients.replica_interface import replica_of
from recover.policy import Policy
from recover.step.clipping import Clipping, refuse_non_positive
from recover.step.joining.extra import refuse_other_extras
from recover.step.loop.stragglers import Stragglers
from recover.world.world import World


def is_whole(value: Any) -> bool:
    """Whether `value` is an integer, of Python or numpy; a bool is not."""
    return hasattr(value, "__index__") and not isinstance(value, bool | torch.Tensor)


def check_arguments(
    world: Any,
    model: Any,
    optimizer: Any,
    global_batch: int,
    clip: Any,
    reduction: str,
    gradients: Any,
    bucket_mb: float | None,
    extra: Mapping[str, Any] | None,
) -> None:
    """Raises TypeError or ValueError for arguments with which no step can be taken."""
    optimizers = optimizers_of(optimizer)
    kinds = (hasattr(world, "grid"), isinstance(model, torch.nn.Module))
    if not all(kinds) or not optimizers or not all(hasattr(each, "param_groups") for each in optimizers):
        several = f"{type(optimizer).__name__} of ({', '.join(type(each).__name__ for each in optimizers)})"
        of_optimizer = several if isinstance(optimizer, list | tuple) else type(optimizer).__name__
        raise TypeError(
            f"Step was given a {type(world).__name__}, {type(model).__name__}, {of_optimizer}; give it "
            "recover.Step(world, model, optimizer, global_batch=...), with the world from recover.init(), a module "
            "and an optimizer of torch's, or a list of them"
        )
    if not is_whole(global_batch):
        raise TypeError(f"global_batch is {global_batch!r}; give a whole number of microbatches")
    if global_batch < 1:
        raise ValueError(f"global_batch is {global_batch}; it must be at least 1 microbatch")
    refuse_non_positive("bucket_mb", bucket_mb)
    if Clipping(clip, optimizer).by_group and gradients is not None:
        raise ValueError(
            "clip has an entry for each parameter group, and the buckets of gradients= mix groups; give one number, "
            "or leave gradients= out"
        )
    if gradients is not None and reduction != "fast":
        raise ValueError(f"reduction={reduction!r} needs gradients per microbatch; leave gradients= out")
    refuse_other_extras(extra or {})


def check_reduction_bits(bits: Any, reduction: str, global_batch: int) -> None:
    """Raises ValueError for words in which this reduction cannot sum `global_batch` microbatches."""
    if bits not in BITS:
        raise ValueError(
            f"reduction_bits is {bits!r}; give 64 or 32, the bits of a word of a reproducible sum"
        )
    if reduction == "fast" and bits != 64:
        raise ValueError(
            f"reduction_bits={bits} belongs to reduction='reproducible', and reduction is 'fast', which sums float32; "
            "leave reduction_bits out, or use reduction='reproducible'"
        )
    if reduction != "fast":
        refuse_batch(global_batch, bits)


def check_verify(verify: Any, global_batch: int, samples: str, gradients: Any) -> None:
    """Raises for numbers of verified slots that no step can have, and for options that exclude `verify`."""
    if not is_whole(verify):
        raise TypeError(f"verify is {verify!r}; give a whole number of slots per step, or 0 for none")
    if not 0 <= verify <= global_batch:
        raise ValueError(
            f"verify is {verify}; give 0 (no slot is verified) to global_batch={global_batch} (each of them)"
        )
    if verify and samples != "exact":
        raise ValueError(
            f"verify={verify} needs samples='exact', and samples is {samples!r}: with other samples no second replica "
            "can compute the same microbatch; use samples='exact', or verify=0"
        )
    if verify and gradients is not None:
        raise ValueError(
            f"verify={verify} needs the gradient of each microbatch, and gradients={type(gradients).__name__} has only "
            "sums of them (drop-in DDP and FSDP1); give Step the plain module without gradients=, or verify=0"
        )


def check_join(join: Any) -> None:
    """Raises ValueError for an unknown way of joining."""
    if join not in ("pause", "instalments"):
        raise ValueError(
            f"join is {join!r}; give 'pause' (a joining replica gets the state between two steps) or 'instalments' (it "
            "gets a part with each step)"
        )


def refuse_other_size(world: World, model: torch.nn.Module) -> None:
    if replica_of(model).size != world.grid.replica_size:
        raise ValueError(
            f"a replica has {world.grid.replica_size} ranks, and the model is built for "
            f"{replica_of(model).size}; build it with recover.hsdp or recover.threed, or use --replica-size 1"
        )


class Position:
    """The position of a run: the same on all replicas after each step."""

    def __init__(
        self,
        global_batch: int,
        samples: Any,
        stragglers: Stragglers,
        policy: Policy,
        exponents: Exponents | None = None,
    ) -> None:
        self.index = 0  # committed steps
        self.skipped = 0  # committed steps that did not call the optimizer
        self.samples, self.stragglers, self._exponents = samples, stragglers, exponents
        self._policy = policy
        self._global_batch = global_batch
        self._torn = False
        self._order: dict[str, Any] = {}  # arguments of the stream that is read
        self._saved_order: dict[str, Any] = {}  # arguments of the stream before the run was resumed

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Around the update of a step that all replicas have agreed on. If it raises, this
        replica is torn: it may hold half of an update that the others hold whole."""
        self._torn = True
        yield
        self._torn = False

    def refuse_torn(self) -> None:
        if self._torn:
            raise RuntimeError(
                f"step {self.index + 1} was agreed on, but an exception kept this replica from taking it: its "
                "parameters may be half updated; let that exception end the rank, and the others go on without it"
            )

    def read_from(self, stream: Any) -> str | None:
        """Note the stream that steps read from now on. Returns a warning if it is the first one
        after a resume and its arguments differ from those before: the same sample numbers then
        stand for other samples."""
        saved, self._saved_order = self._saved_order, {}
        # Only streams of recover.stream have this attribute.
        self._order = getattr(stream, "recover_order", {})
        other = {
            name: (value, self._order[name])
            for name, value in saved.items()
            if self._order.get(name, value) != value
        }
        if not other:
            return None
        said = ", ".join(
            f"{name}={here} instead of {name}={before}" for name, (before, here) in other.items()
        )
        return (
            f"the run is resumed after step {self.index} with another stream ({said}): microbatch i has other samples "
            "than before, so some are read twice and some never; give recover.stream the same arguments"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "skipped": self.skipped,
            "global_batch": self._global_batch,
            "samples": {"mode": self.samples.mode, **self.samples.state_dict()},
            **({"exponents": self._exponents.state_dict()} if self._exponents else {}),
            **({"stream": self._order} if self._order else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any], rebatch: bool = False) -> None:
        check_position(state, self.state_dict(), rebatch)
        self.index, self.skipped = state["index"], state["skipped"]
        self.samples.load_state_dict(state["samples"])
        if self._exponents is not None and "exponents" in state:  # a run with fast sums has saved none
            self._exponents.load_state_dict(state["exponents"])
        self._saved_order = dict(state.get("stream", {}))

    def give(self) -> dict[str, Any]:
        """The position that a joining replica receives: it takes part in this run, so it must also know
        the owner of each partition."""
        return {
            "step": self.state_dict(),
            "owners": self.samples.owners,
            "paces": self.stragglers.state_dict(),
            "policy": self._policy.state_dict(),
        }

    def take(self, given: Mapping[str, Any]) -> None:
        self.samples.take_over(given["owners"])
        self.load_state_dict(given["step"])
        self._saved_order = {}  # the members have made this comparison
        self.stragglers.load_state_dict(given["paces"])
        self._policy.load_state_dict(given["policy"])


def check_position(state: Mapping[str, Any], here: dict[str, Any], rebatch: bool) -> None:
    """Raises ValueError if a step whose own state is `here` would not go on with the run that
    saved `state`."""
    samples = state.get("samples", {})
    if {"global_batch", "index", "skipped"} - state.keys() or "mode" not in samples:
        raise ValueError(
            f"this state of a step, {state}, does not tell which sample comes next (earlier versions saved less); "
            f"complete it by hand: step.state_dict() has the form {here}"
        )
    if samples["mode"] != here["samples"]["mode"]:
        raise ValueError(
            f"this state was saved with samples={samples['mode']!r}, and this step has "
            f"samples={here['samples']['mode']!r}; go on with the mode it was saved with"
        )
    if state["global_batch"] != here["global_batch"] and not rebatch:
        raise ValueError(
            f"this state was saved with global_batch={state['global_batch']}, and this step has "
            f"global_batch={here['global_batch']}; give the same, or rebatch=True (to recover.resume, or "
            "load_state_dict) to go on from the next sample with another batch"
        )
