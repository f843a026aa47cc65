"""`recover leave`: ask one host to leave a running job, while the others go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals

_ANSWER = 30.0  # seconds for the agent of the host to answer


def leave(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory of a running job.")],
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="Name of the host in the job.")],
) -> None:
    """Ask one host to leave a running job, for maintenance. It leaves after its step, and the others go on."""
    from recover.job.leave_request import LEFT, OperatorRequest
    from recover.runs.live.view import RunView
    from recover.runs.records.job_log import hosts_of

    with refusals("recover leave"):
        hosts = hosts_of(run_dir)
        if not hosts:
            raise ValueError(f"{run_dir} holds no job on several hosts; end a job on one host by SIGTERM")
        if host not in hosts:
            raise ValueError(f"--host is {host!r}, and the hosts of the job are {', '.join(hosts)}; name one")
        view = RunView(run_dir)
        view.refresh()
        if (job := view.job()).is_over:
            raise ValueError(f"no job runs in {run_dir}: {job.text}")
        request = OperatorRequest(run_dir, host)
        if request.answered() == LEFT:
            typer.echo(f"host {host} has left the job already")
            return
        request.ask()
        deadline = time.monotonic() + _ANSWER
        while not (answer := request.answered()):
            if request.is_withdrawn:
                raise ValueError(
                    f"the agent of host {host} has ended meanwhile; `recover status {run_dir}` tells why"
                )
            if time.monotonic() > deadline:
                request.withdraw()
                raise ValueError(
                    f"host {host} has not answered for {_ANSWER:g} s; run this command where its agent sees {run_dir}, "
                    f"or send SIGTERM to `recover run` (or `recover train`) on {host}"
                )
            time.sleep(0.1)
        if answer.startswith("refused: "):
            raise ValueError(f"host {host} stays: {answer.removeprefix('refused: ')}")
    if answer == LEFT:
        typer.echo(f"host {host} has left")
        return
    typer.echo(f"host {host} leaves after its step; `recover status {run_dir}` shows when it has left")
