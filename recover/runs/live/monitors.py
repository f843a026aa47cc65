"""Monitors of a running job: the live page, the command for incidents, and traces."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from recover.job.spec import Monitors
from recover.runs.live.page_process import listen, served_page, token_for

LOOPBACK = "127.0.0.1"


def _listen(page: str, bind: str) -> tuple[socket.socket | None, str]:
    """The socket and the token of the page; None if there is no page."""
    if page == "off":
        return None, ""
    try:
        token = token_for(bind)  # first: it raises ValueError if `bind` is no address
        return listen(None if page == "auto" else int(page), bind), token
    except OSError:
        if page != "auto" or bind != LOOPBACK:
            raise
    except ValueError:
        raise ValueError(f"--page-bind is {bind!r}; give an address of this host, as 0.0.0.0") from None
    return None, ""


def make_monitors(
    page: str,
    bind: str,
    on_incident: str | None,
    say: Callable[[str], object],
    otel: bool = False,
    tell_page: bool = True,
) -> Monitors:
    """Returns a context manager that takes the run directory and monitors the job while it is entered.

    `page`: a port, `off`, or `auto` (one of the usual ports, and no page if none is free). The port is bound at once.
    Raises ValueError or OSError if the page cannot be served as asked.
    """
    if page not in ("auto", "off") and not (page.isascii() and page.isdigit() and int(page) < 65536):
        raise ValueError(f"--page is {page!r}; give a port (0: any), or off")
    if otel and importlib.util.find_spec("opentelemetry") is None:
        raise ValueError(
            "--otel needs OpenTelemetry, which is not installed; pip install 'recover-train[otel]'"
        )
    listening, token = _listen(page, bind)

    @contextmanager
    def monitors(run_dir: Path) -> Iterator[None]:
        with ExitStack() as stack:
            if listening is not None:
                place = stack.enter_context(served_page(run_dir, listening, token))
                if tell_page:
                    say(f"page: {place}")
            if on_incident:
                from recover.runs.live.alerts import Alerts

                stack.enter_context(Alerts(run_dir, on_incident, say))
            if otel:
                from recover.runs.live.traces import Traces

                stack.enter_context(Traces(run_dir))
            yield

    return monitors
