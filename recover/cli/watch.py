"""`recover watch`: the live page of a run, from its records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def watch(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory: of a running, finished or copied run.")
    ],
    page: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port; 0: any.  [default: 8470 or next]")
    ] = None,
    page_bind: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address that serves the page. Readers need its token."),
    ] = "127.0.0.1",
) -> None:
    """Serve the live page of a run, until Ctrl-C."""
    from recover.runs.live.page_process import address, listen, serve, token_for
    from recover.runs.live.view import RunView

    with refusals("recover watch"):
        if not run_dir.is_dir():
            raise ValueError(f"{run_dir} is not a directory; name a run directory")
        token, listening = token_for(page_bind), listen(page, page_bind)
    view = RunView(run_dir)
    view.refresh()
    if (left := view.page()) and view.job().is_over:
        typer.echo(f"{run_dir / 'page.url'} is left over: the job that served {left} has ended")
    typer.echo(f"page: {address(listening, token)}")
    try:
        serve(run_dir, listening, token)
    except KeyboardInterrupt:
        pass
