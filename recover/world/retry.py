"""Outside of steps: what one survivor has to do, whoever dies over it."""

from __future__ import annotations

from collections.abc import Callable

from recover.world.calls import Call
from recover.world.world import World


def do_despite_losses(
    world: World,
    call: Call,
    act: Callable[[], object],
    lost: Callable[[tuple[int, ...], float], object],
) -> None:
    """Nobody goes on before `act` has been done by a rank that lived to the end of it.

    Every survivor calls `act`, which finds out whether it is this rank that has something to do; after a death, again.
    `lost` is told of ranks that died meanwhile and of how long the repair took. `call`: what all replicas call here.
    """
    with world.call(call, lost):
        while True:
            act()
            if world.agree(1) is not None:
                return
            census = world.repair()
            lost(census.lost, census.seconds)
