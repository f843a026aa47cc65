"""All figures that benchmarks publish, by name, in the order of the page."""

from __future__ import annotations

from recover_lab.bench import (
    breakdown,
    collectives,
    gpu,
    multi,
    paced,
    peers,
    rejoin,
    rejoin_hosts,
    several_hosts,
    simulations,
    sweep,
    titan,
    training,
    trajectory,
    verify,
)

FIGURES = {
    figure.name: figure
    for figure in (
        trajectory.FIGURE,
        breakdown.FIGURE,
        multi.FIGURE,
        sweep.FIGURE,
        peers.FIGURE,
        training.OVERHEAD,
        training.RECOVERY,
        collectives.REPAIR,
        collectives.COLLECTIVES,
        several_hosts.FIGURE,
        rejoin_hosts.FIGURE,
        rejoin.FIGURE,
        verify.FIGURE,
        paced.FIGURE,
        gpu.FIGURE,
        titan.FIGURE,
        simulations.FIGURE,
    )
}
