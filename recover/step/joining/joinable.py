"""Obstacles to joining: state that a joining replica would not receive, because only the user's
code refers to it.

They are found before a replica joins, and reported with the remedy: a replica without that state would
compute wrong numbers, and no vote could tell which replica is right.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from recover.gradients.optimizers import optimizers_of
from recover.step.joining.extra import Extra
from recover.step.joining.parcel import Parcel
from recover.world import rank_exit
from recover.world.world import World

GIVE_SCHEDULER = (
    'write recover.Step(..., extra={"scheduler": scheduler}) if your loop calls scheduler.step(), or '
    "scheduler=scheduler if Step shall call it"
)


class Joinable:
    """Whether replicas can join, and if not, why. The answer is the same on all members."""

    def __init__(
        self,
        world: World,
        state: tuple[torch.nn.Module, Any, Any, Mapping[str, Extra]],
        extra: Mapping[str, Extra],
    ) -> None:
        """`state`: what a joining replica receives; `extra`: the entries of the user in it."""
        self._world, self._state, self._extra = world, state, extra
        self._saved_alone: set[str] = set()  # extras that recover.save was given and Step was not
        self._reported = ""
        self._has_looked_for_schedulers = False
        self._searched: list[int] = []  # references and extras at the last search that found no scheduler

    def obstacle(self) -> str | None:
        """State that a joining replica would not receive, with the remedy; None if there is
        none."""
        if self._saved_alone:
            names = ", ".join(map(repr, sorted(self._saved_alone)))
            return (
                f"recover.save was given extra {names}, which Step does not have; give it to recover.Step(..., "
                "extra={...}), which recover.save and recover.resume use as well (a number or a string belongs into "
                "a dict that is given to Step and changed in place)"
            )
        if unknown := self._undeclared_schedulers():
            kinds = ", ".join(sorted({type(each).__name__ for each in unknown}))
            return f"the learning rate is set by a {kinds} that Step was not given; {GIVE_SCHEDULER}"
        return Parcel(*self._state).obstacle()

    def _undeclared_schedulers(self) -> list[Any]:
        """Schedulers that Step was not given.

        A search looks at all objects of the process, which takes a tenth of a second, and members wait
        for it. A scheduler refers to its optimizer: so nothing is searched for while the number of
        references, and the extras, are those of the last search that found nothing.
        """
        _, optimizer, scheduler, _ = self._state
        now = [sys.getrefcount(each) for each in optimizers_of(optimizer)]
        now += map(id, self._extra.values())
        if self._searched == now:
            return []
        found = undeclared_schedulers(optimizer, [scheduler, *self._extra.values()])
        self._searched = [] if found else now
        return found

    def saved(self, extra: Mapping[str, Any]) -> None:
        """Note that `recover.save` was given these entries, on all replicas alike."""
        known = list(self._extra.values())
        alone = {name for name, value in extra.items() if not any(value is each for each in known)}
        self._saved_alone = self._saved_alone - self._extra.keys() | alone
        if alone:
            self.report()
        self._report_schedulers(
            extra,
            "checkpoints of this run lack the {} that sets the learning rate, and a resumed run would begin its "
            "schedule again",
        )

    def resumed(self, step: int, place: str, saved: Mapping[str, Any]) -> None:
        """Note that `recover.resume` has read a checkpoint with these extras, on all replicas alike."""
        self._tell(f"resumed after step {step} from {place}")
        self._report_schedulers(
            saved, f"{place} lacks the {{}} that sets the learning rate, so its schedule begins again"
        )

    def report(self) -> None:
        """Report once why no replica can join, in a job whose lost replicas may be restarted."""
        if not self._world.job.room or (why := self.obstacle()) is None or why == self._reported:
            return
        self._reported = why
        self._tell(f"no replica can join this job: {why}")

    def _report_schedulers(self, extra: Mapping[str, Any], what: str) -> None:
        """Report once which schedulers neither `Step` nor these extras hold; `what` has a place for their names."""
        if self._has_looked_for_schedulers:
            return
        self._has_looked_for_schedulers = True
        _, optimizer, scheduler, _ = self._state
        unknown = undeclared_schedulers(optimizer, [scheduler, *self._extra.values(), *extra.values()])
        # Saved by hand: extra={"scheduler": scheduler.state_dict()}
        by_hand = [value.keys() for value in extra.values() if isinstance(value, Mapping)]
        if unsaved := [each for each in unknown if not (by_hand and each.state_dict().keys() in by_hand)]:
            kinds = ", ".join(sorted({type(each).__name__ for each in unsaved}))
            self._tell(f"{what.format(kinds)}: {GIVE_SCHEDULER}")

    def _tell(self, text: str) -> None:
        rank_exit.report(text, self._world.rank == min(self._world.members))


def undeclared_schedulers(optimizer: Any, declared: Iterable[Any]) -> list[Any]:
    """Living schedulers of this optimizer, or of several, that are neither among these objects nor
    inside of them."""
    known = {id(each) for each in _inside(declared)}
    every = optimizers_of(optimizer)
    if not any(id(found) not in known for each in every for found in _schedulers_of(each)):
        return []
    gc.collect()  # a scheduler that was dropped may not have been collected yet
    return [found for each in every for found in _schedulers_of(each) if id(found) not in known]


def _schedulers_of(optimizer: Any) -> list[Any]:
    """All schedulers that refer to the optimizer: ReduceLROnPlateau leaves no other trace."""
    holders = gc.get_referrers(optimizer)
    attributes = [each for each in holders if type(each) is dict and each.get("optimizer") is optimizer]
    # The attributes of an object may be a dict of its own, which refers to the optimizer in its
    # stead.
    owners = [each for each in gc.get_referrers(*attributes) if type(each) is not dict] if attributes else []
    return [
        each
        for each in {id(each): each for each in (*holders, *owners)}.values()
        if _sets_rate(each, optimizer)
    ]


def _sets_rate(value: Any, optimizer: Any) -> bool:
    """Whether `value` is a scheduler of this optimizer: one of torch's, or one that looks like them. A
    wrapper of an optimizer is none: it has parameter groups."""
    kind = type(value)
    if issubclass(kind, LRScheduler):
        return value.optimizer is optimizer
    methods = all(callable(getattr(kind, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return (
        methods
        and not any(hasattr(kind, name) for name in ("zero_grad", "param_groups", "backward"))
        and getattr(value, "__dict__", {}).get("optimizer") is optimizer
    )


def _inside(declared: Iterable[Any]) -> list[Any]:
    """These objects, what they hold as attributes, and the schedulers inside of schedulers."""
    found: dict[int, Any] = {}
    pending = [(value, True) for value in declared]
    while pending:
        value, is_declared = pending.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, list | tuple):
            pending += [(each, is_declared) for each in value]
        elif isinstance(value, dict):
            pending += [(each, is_declared) for each in value.values()]
        elif hasattr(value, "__dict__") and (is_declared or isinstance(value, LRScheduler)):
            pending += [(each, False) for each in vars(value).values()]
    return list(found.values())
