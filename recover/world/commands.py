"""Commands to joining ranks: a rank that is in the group and does not hold the state yet executes
commands of the coordinator, and decides nothing.

The coordinator of a cross-replica group, its lowest rank with the state, sends a command before every
agreement of the members and before every operation of the group outside of steps, so that joining
ranks take part in them; steps and hand-overs have commands of their own (`recover.step.joining`).
A joining rank that receives no more commands (its coordinator has died, or a member has aborted the
group) goes to a repair. The members come to a repair as well: the tag of its first agreement fails
every agreement that they are in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recover.job.authentication import Authenticator
from recover.world.carriers.base import wire_type
from recover.world.carriers.worker import Work
from recover.world.cross_group import CrossGroup

WORD = 8  # bytes
FRAME = 64  # words of the first message: most commands fit into it
Command = dict[str, Any]

AGREE, OPERATION = "agree", "operation"  # values of "do"; others belong to steps


class CommandChannel:
    """Commands in one cross-replica group, in one epoch. Each is signed for its place in the
    order, so none can be repeated or left out."""

    def __init__(
        self,
        cross: CrossGroup,
        coordinator: int,
        takers: Sequence[int],
        authenticator: Authenticator,
        epoch: int,
    ) -> None:
        """`coordinator`, `takers`: ranks of this group."""
        self._cross, self._authenticator = cross, authenticator
        self._coordinator, self._takers = cross.peers.index(coordinator), list(map(cross.peers.index, takers))
        self._place = f"epoch {epoch} from rank {coordinator} command "
        self._count = 0

    def tell(self, command: Mapping[str, Any]) -> Work:
        """Send a command to all takers. Returns the last of its messages; a failure breaks the group."""
        signed = self._authenticator.sign(self._next_place(), json.dumps(command).encode())
        words = np.zeros(max(FRAME, 1 + -(-len(signed) // WORD)), np.int64)
        words[0] = len(signed)
        words[1:].view(np.uint8)[: len(signed)] = np.frombuffer(signed, np.uint8)
        work = self._send(words[:FRAME])
        return self._send(words[FRAME:]) if len(words) > FRAME else work

    def listen(self) -> Command | None:
        """Wait for the next command. None if the group is broken, or if a message was not signed by
        a member."""
        first = self._receive(FRAME)
        if first is None:
            return None
        length = int(first[0])
        words = [first[1:]]
        if (more := 1 + -(-length // WORD) - FRAME) > 0:
            rest = self._receive(more)
            if rest is None:
                return None
            words.append(rest)
        signed = np.concatenate(words).view(np.uint8)[:length].tobytes()
        opened = self._authenticator.opened(self._next_place(), signed)
        if opened is None:  # checked before any part of it is parsed
            self._cross.abort_operations("a command was not signed with this job's token")
            return None
        command: Command = json.loads(opened)
        return command

    def _next_place(self) -> str:
        self._count += 1
        return f"{self._place}{self._count}"

    def _send(self, words: np.ndarray) -> Work:
        return self._cross.exchange(dict.fromkeys(self._takers, words), {})

    def _receive(self, words: int) -> np.ndarray | None:
        room = np.zeros(words, np.int64)
        return room if self._cross.exchange({}, {self._coordinator: room}).wait() else None


def operation(name: str, data: Any = None, root: int = 0) -> Command:
    """The command to take part in an operation on data like `data`."""
    if data is None:
        return {"do": OPERATION, "name": name}
    device = getattr(data, "device", None)
    return {
        "do": OPERATION,
        "name": name,
        "type": wire_type(data),
        "shape": list(data.shape),
        "root": root,
        "device": getattr(device, "type", "cpu"),
    }


def take_part(cross: CrossGroup, command: Mapping[str, Any]) -> bool:
    """Take part in an operation without contributing: zeros to a sum, the lowest number to a
    maximum. Returns whether the operation succeeded on this rank."""
    name = command["name"]
    if name == "barrier":
        return cross.barrier().wait()
    data = _room(command, command["shape"])
    if name == "all_max":
        data[...] = np.iinfo(np.int32).min
        return cross.all_max(data).wait()
    if name == "broadcast":
        return cross.broadcast(data, command["root"]).wait()
    if name == "all_gather":
        return cross.all_gather(data, _room(command, [cross.size, *command["shape"]])).wait()
    return cross.all_reduce(data).wait()


def _room(command: Mapping[str, Any], shape: Sequence[int]) -> Any:
    """Zeros of the type and on the kind of device of the members: their data take the same way."""
    if command["device"] == "cpu":
        return np.zeros(shape, command["type"])
    import torch

    return torch.zeros(*shape, dtype=getattr(torch, command["type"]), device=command["device"])
