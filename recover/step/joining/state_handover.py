"""A replica joins, as `Step` has it: the members give their state, the newcomer takes it, and all go on from there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from recover.job.authentication import Authenticator
from recover.step.incident import Incident
from recover.step.joining.admission import admit_replicas, join_members
from recover.step.joining.extra import Extra
from recover.step.joining.joinable import Joinable
from recover.step.joining.packing import NotPackableError
from recover.step.joining.parcel import OtherStateError, Parcel, buffers_like, refusal
from recover.step.joining.stripes import Stripes
from recover.step.position import Position
from recover.step.randomness import generators, set_generators
from recover.step.record import Arrival
from recover.step.transaction import Transaction
from recover.world import rank_exit
from recover.world.liveness.board import age
from recover.world.world import World


class StateHandover:
    """Both sides of it. `state`: model, optimizer, scheduler if any, and what the user has added.

    `take_over`: does what one that is gone had to do once (`recover.step.on_first`). `joinable`: whether all that a
    replica needs is known here.
    """

    def __init__(
        self,
        world: World,
        transaction: Transaction,
        position: Position,
        state: tuple[torch.nn.Module, Any, Any, Mapping[str, Extra]],
        take_over: Callable[[], object],
        joinable: Joinable,
    ) -> None:
        self._world, self._transaction, self._take_over = world, transaction, take_over
        self._position, self._state, self._joinable = position, state, joinable
        self._device = next(state[0].parameters()).device

    def admit(self) -> list[Incident]:
        """For members, when somebody has asked. What has happened over it."""
        return admit_replicas(self._transaction, self._give)

    def join(self) -> list[Incident]:
        """For the newcomer: ask, be admitted, take the state. Raises OtherStateError, before it asks, if it would lack
        something: it runs the script of the others, so they lack it as well."""
        if (why := self._joinable.obstacle()) is not None:
            raise OtherStateError(f"this replica cannot join: {why}")
        return join_members(self._transaction, Arrival(socket.gethostname(), age()), self._take)

    def _give(self, givers: tuple[int, ...], takers: tuple[int, ...]) -> int | None:
        # A newcomer does not know what was asked for before it came: so none of that is left to do when it has.
        self._take_over()
        head, parts = self._packed()
        head = self._authenticator.sign(self._place(givers), head)
        stripes = self._stripes(givers, takers, parts)
        return _size(parts) if stripes.send_head(head) and stripes.give(parts) else None

    def _packed(self) -> tuple[bytes, list[torch.Tensor]]:
        """The state, or the reason why nobody can be given it: the newcomer ends by that, and the others go on."""
        if (why := self._joinable.obstacle()) is not None:
            return refusal(why), []
        board, rank = self._world.board, self._world.rank
        more = {"votes": board.votes(rank), "generators": generators(self._device)}
        try:
            return Parcel(*self._state).pack(self._position.give() | more)
        except NotPackableError as error:
            return refusal(str(error)), []

    def _take(self, givers: tuple[int, ...], takers: tuple[int, ...]) -> int | None:
        parcel = Parcel(*self._state)
        signed = self._stripes(givers, takers, []).receive_head()
        if signed is None:
            return None
        head = self._authenticator.opened(self._place(givers), signed)
        if head is None:  # before anything of it is looked at
            rank_exit.log("the state that was offered was not signed with this job's token, and is not taken")
            return None
        parts = parcel.open(head)
        # From here on it is where the others are: if it does nothing for too long, it is fenced as any of them.
        self._world.board.catch_up(
            self._world.rank, parcel.position["votes"], parcel.position["step"]["index"] + 1
        )
        if not self._stripes(givers, takers, parts).take(parts):
            return None
        position = parcel.install()
        self._position.take(position)
        set_generators(position["generators"], self._device)
        self._transaction.adopt_step(self._position.index + 1)
        return _size(parts)

    @cached_property
    def _authenticator(self) -> Authenticator:
        return Authenticator(self._world.token, "state")

    def _place(self, givers: tuple[int, ...]) -> str:
        """Where the head of the state comes from: it is of no use from another rank, or in another epoch."""
        giver = next(rank for rank in givers if rank in self._world.cross.peers)
        return f"epoch {self._world.epoch} from rank {giver}"

    def _stripes(
        self, givers: tuple[int, ...], takers: tuple[int, ...], parts: list[torch.Tensor]
    ) -> Stripes:
        if not parts:
            return Stripes(self._world.cross, givers, takers)
        return Stripes(
            self._world.cross,
            givers,
            takers,
            buffers_like(parts),
            lambda words: words.view(torch.uint8),
            lambda work: self._world.hooks.under_way("repair", work, "in-state"),
        )


def _size(parts: list[torch.Tensor]) -> int:
    return sum(map(len, parts))
