"""The HTTP server of the live page: one run, read only, for few readers, from the standard library.

It runs in a process of its own, so that readers cannot disturb the job. It serves the run's records and writes
nothing. On an address that other hosts can reach, every request needs the token.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from recover.job.optional_packages import MissingExtra, need
from recover.runs.live.view import RunView
from recover.runs.records.curve_table import POINTS
from recover.runs.web.assets import with_assets

READERS = 64  # connections at once; more are rejected
_TICK = 0.25  # seconds between two reads of the records for an open page
_BEAT = 10.0  # seconds without an event after which a page counts as disconnected
_PATIENCE = 5.0  # seconds that a reader may take to accept data; afterwards it reconnects and catches up
_CATCH_UP = 300  # steps that are sent one by one; a page that has missed more gets the whole curve
LAST_FRAME = 10.0  # seconds that open pages have to take the last state
_COOKIE = "recover_token"
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer(ThreadingHTTPServer):
    """Serves one run on a socket that listens already."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, run_dir: Path, listening: socket.socket, token: str = "") -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.view, self.token = RunView(run_dir), token
        self.loopback = ip_address(listening.getsockname()[0]).is_loopback
        self.page = with_assets(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).encode()
        self.closing = threading.Event()  # the job has ended: open pages get their last frame
        self.last_request = time.monotonic()
        self._places = threading.BoundedSemaphore(READERS)
        self._counting = threading.Lock()
        self.readers = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        self.last_request = time.monotonic()
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._counting:
            self.readers += 1
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._counting:
                self.readers -= 1
            self._places.release()

    def finish(self) -> None:
        """Send every open page the last state of the run, then stop serving. Readers that are too slow for it are
        not waited for."""
        self.closing.set()
        deadline = time.monotonic() + LAST_FRAME
        while self.readers and time.monotonic() < deadline:
            time.sleep(0.02)
        self.shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: a reader has disconnected, or has sent an invalid request."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "recover", ""
    timeout = 10.0  # seconds for a request to arrive
    protocol_version = "HTTP/1.0"  # each answer ends its connection

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._may(query):
            return
        if url.path == "/":
            if "token" in query:  # keeps the token out of the address bar and of the Referer header
                self.send_response(HTTPStatus.SEE_OTHER)
                self.send_header("Location", "/")
                self.send_header(
                    "Set-Cookie", f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
                )
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._answer(self.server.page, "text/html; charset=utf-8")
        elif url.path == "/events":
            self._stream()
        elif url.path == "/status.json":
            self.server.view.refresh()
            self._answer(json.dumps(status(self.server.view)).encode(), "application/json")
        elif url.path == "/metrics":
            self._tell_prometheus()
        elif url.path.startswith("/log/"):
            rank = url.path.removeprefix("/log/")
            text = (
                self.server.view.log(int(rank))
                if rank.isascii() and rank.isdigit() and len(rank) < 8
                else None
            )
            if text is None:
                self.send_error(HTTPStatus.NOT_FOUND, "there is no log of this rank")
            else:
                self._answer(text.encode(), "text/plain; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "nothing of this name is served")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: no user would read the log."""

    def _may(self, query: dict[str, list[str]]) -> bool:
        """Whether the request may be answered; otherwise an error is sent. With a token, the request must have it. On
        loopback, it must use a name of this host: another site may let its own name point here."""
        if self.server.token:
            said = [*query.get("token", ()), self.headers.get("Authorization", "").removeprefix("Bearer ")]
            try:
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
                said += [cookie.value] if cookie else []
            except CookieError:
                pass
            if not any(hmac.compare_digest(one.encode(), self.server.token.encode()) for one in said):
                self.send_error(HTTPStatus.UNAUTHORIZED, "this page needs the token that the job has printed")
                return False
        elif self.server.loopback and not _is_this_host(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "ask for it as localhost or 127.0.0.1")
            return False
        return True

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def _tell_prometheus(self) -> None:
        try:
            need("prometheus_client", "/metrics")
        except MissingExtra as missing:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED, str(missing))
            return
        from recover.runs.live.prometheus import CONTENT_TYPE, exposition

        self.server.view.refresh()
        self._answer(exposition(self.server.view), CONTENT_TYPE)

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.connection.settimeout(_PATIENCE)
            self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.connection.settimeout(_PATIENCE)
        for event in events(
            self.server.view, self.headers.get("Last-Event-ID", ""), closing=self.server.closing
        ):
            try:
                self.wfile.write(event)
            except OSError:  # the reader is gone, or too slow: it reconnects
                return


def status(view: RunView) -> dict[str, Any]:
    """All facts about a run, without the curves."""
    return {**view.state(), "ranks": view.ranks(), "losses": view.incidents()}


def events(
    view: RunView, last: str = "", tick: float = _TICK, closing: threading.Event | None = None
) -> Iterator[bytes]:
    """Server-sent events: first those that a page has missed since event `last`, then new ones, until `closing` is set.
    The records are complete by then: they are read once more, and the event `end` says that nothing follows."""
    generation, count = _read_id(last)
    closing = closing or threading.Event()
    state = incidents = heldout = ""
    ranks: dict[int, str] = {}
    whole, quiet = 0, time.monotonic()
    yield b"retry: 1000\n\n"  # milliseconds after which a page reconnects
    ended = False
    while not ended:
        ended = closing.is_set()  # before the records are read
        view.refresh(at_once=ended)
        said: list[tuple[str, Any]] = []
        if generation != view.generation or not 0 <= view.count - count <= _CATCH_UP or whole > POINTS:
            generation, whole = view.generation, 0
            series = view.series()
            count = series["count"]
            said.append(("series", series))
        elif view.count > count:
            fresh = view.since(count)
            count, whole = count + len(fresh), whole + len(fresh)
            said.append(("steps", fresh))
        if (evaluated := json.dumps(found := view.heldout())) != heldout:
            heldout = evaluated
            said.append(("heldout", found))
        if (now := json.dumps(view.state())) != state:
            state = now
            said.append(("state", json.loads(now)))
        if (told := json.dumps(losses := view.incidents())) != incidents:
            incidents = told
            said.append(("incidents", losses))
        every = {entry["rank"]: json.dumps(entry) for entry in view.ranks()}
        changed = [json.loads(text) for rank, text in every.items() if ranks.get(rank) != text]
        changed += [{"rank": rank, "removed": True} for rank in ranks.keys() - every.keys()]  # a new launch
        if changed:
            ranks = every
            said.append(("ranks", changed))
        # SIGTERM may reach the server of a job that goes on: the page then connects again.
        if ended and view.job().is_over:
            said.append(("end", {}))
        for name, data in said:
            yield f"id: {generation}:{count}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()
        if said:
            quiet = time.monotonic()
        elif time.monotonic() - quiet > _BEAT:
            quiet = time.monotonic()
            yield b": still here\n\n"
        closing.wait(tick)


def _read_id(last: str) -> tuple[int, int]:
    generation, _, count = last.partition(":")
    if generation.isascii() and generation.isdigit() and count.isascii() and count.isdigit():
        return int(generation[:12]), int(count[:9])
    return -1, 0


def _is_this_host(said: str) -> bool:
    name = said.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
