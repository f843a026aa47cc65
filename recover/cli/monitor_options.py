"""The options of `recover run` and `recover train` for whoever looks on."""

from __future__ import annotations

from typing import Annotated

import typer

Page = Annotated[
    str,
    typer.Option(
        metavar="PORT|off", help="Where the live page is served, on this host alone.  [default: 8470 or next]"
    ),
]
PageBind = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Serve the page on this address, for who has its token.")
]
OnIncident = Annotated[
    str | None,
    typer.Option(
        metavar="CMD", help="Run CMD after every loss, with all that is known of it as JSON on its stdin."
    ),
]
Otel = Annotated[
    bool,
    typer.Option(
        "--otel",
        help="Send steps and repairs as OpenTelemetry traces, where OTEL_EXPORTER_OTLP_ENDPOINT says.",
    ),
]
