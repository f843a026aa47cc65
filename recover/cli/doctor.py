"""`recover doctor`: is this machine fit?"""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    mpirun: Annotated[
        str | None, typer.Option(help="Open MPI's mpirun.  [default: the one beside this Python, then PATH]")
    ] = None,
) -> None:
    """Check this machine: versions, fault tolerance, memory, cores, and three real processes, one killed."""
    from recover.launch.doctor import examine

    raise typer.Exit(examine(mpirun))
