"""Monitoring options of `recover run` and `recover train`."""

from __future__ import annotations

from typing import Annotated

import typer

Page = Annotated[
    str,
    typer.Option(
        metavar="PORT|off",
        help="Port of the live page, on this host only.  [default: 8470 or next]",
    ),
]
PageBind = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address that serves the page. Readers need its token.")
]
OnIncident = Annotated[
    str | None,
    typer.Option(metavar="CMD", help="Run CMD after every loss, with the facts about it as JSON on stdin."),
]
Otel = Annotated[
    bool,
    typer.Option(
        "--otel",
        help="Send steps and repairs as OpenTelemetry traces to OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]
