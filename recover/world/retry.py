"""Outside of steps: an action of one rank that is repeated by another one if its rank dies."""

from __future__ import annotations

from collections.abc import Callable

from recover.world.calls import Call
from recover.world.world import World


def retry_after_repair(
    world: World,
    call: Call,
    act: Callable[[], object],
    lost: Callable[[tuple[int, ...], float], object],
) -> None:
    """Return once `act` has been completed by ranks that survived it.

    Every survivor calls `act`, which decides whether this rank has something to do; after a death,
    all call it again. `lost` is called with the ranks that died meanwhile and the seconds of the
    repair. `call`: the collective call.
    """
    with world.call(call, lost):
        while True:
            act()
            if world.agree(1) is not None:
                return
            census = world.repair()
            lost(census.lost, census.seconds)
