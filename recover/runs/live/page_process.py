"""The live page of a running job. Until the first request there is only a socket and a thread that waits; then a
process serves it.

All work for readers happens in that process. It exits when there was no reader for a while and dies with the process
that started it; if it crashes, the next request starts another one.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from recover.job.record_files import FILES
from recover.runs.records.job_log import ADDRESS

FIRST_PORT, LAST_PORT = 8470, 8489  # ports that are tried first; if all are taken, any free one
_TOKEN = "RECOVER_PAGE_TOKEN"
_IDLE = 300.0  # seconds without a reader
_LOOK = 1.0  # seconds between checks of the process, and between two starts of one that keeps crashing
_LAST_FRAME = 12.0  # seconds that the process has for the last frame of open pages; longer than LAST_FRAME
_PR_SET_PDEATHSIG = 1


def listen(port: int | None, bind: str = "127.0.0.1") -> socket.socket:
    """Bind a socket to this port; None: to one of the usual ports, or to any. Raises OSError, ValueError."""
    ip_address(bind)
    ports = [port] if port is not None else [*range(FIRST_PORT, LAST_PORT + 1), 0]
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    for number in ports:
        try:
            return socket.create_server((bind, number), family=family, backlog=128)
        except OSError as error:
            if number == ports[-1]:
                raise OSError(
                    error.errno,
                    f"the page cannot be served on {bind}, port {number} ({error.strerror}); give another --page",
                ) from None
    raise AssertionError("no port was tried")


def token_for(bind: str) -> str:
    """The page's token, for an address that other hosts can reach; "" on loopback. It differs from the job's token,
    so that readers of the page cannot take part in the job."""
    return "" if ip_address(bind).is_loopback else secrets.token_urlsafe(24)


def address(listening: socket.socket, token: str) -> str:
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = socket.gethostname()
    elif ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}/" + (f"?token={token}" if token else "")


@contextmanager
def served_page(run_dir: Path, listening: socket.socket, token: str) -> Iterator[str]:
    """Serve the page of this run while entered; yields its address."""
    place = run_dir / ADDRESS
    told = address(listening, token)
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(told + "\n")
    except OSError:
        pass  # a full disk: the page is served all the same
    keeper = _ProcessKeeper(run_dir, listening, token)
    try:
        yield told
    finally:
        keeper.stop()
        if FILES.read(place) == told.encode() + b"\n":  # hosts that share the directory have a page each
            FILES.remove(place)


class _ProcessKeeper:
    """Starts the process at the first request, and again if it has exited."""

    def __init__(self, run_dir: Path, listening: socket.socket, token: str) -> None:
        self._run_dir, self._listening, self._token = run_dir, listening, token
        self._process: subprocess.Popen[bytes] | None = None
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._loop, name="recover-page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.close(self._woken)
        self._thread.join()
        os.close(self._wake)
        self._listening.close()

    def _loop(self) -> None:
        while True:
            ready, _, _ = select.select([self._wake, self._listening.fileno()], [], [])
            if self._wake in ready:
                return
            # Started by this thread, because the process dies with the thread that started it.
            with subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "recover.runs.live.page_process",
                    str(self._run_dir),
                    str(self._listening.fileno()),
                ],
                env=os.environ | {_TOKEN: self._token},
                pass_fds=[self._listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
            ) as process:
                while select.select([self._wake], [], [], _LOOK)[0] == []:
                    if process.poll() is not None:
                        break
                else:
                    # The records are whole now: open pages get their last frame.
                    process.terminate()
                    try:
                        process.wait(_LAST_FRAME)
                    except subprocess.TimeoutExpired:
                        process.kill()
                    return


def serve(run_dir: Path, listening: socket.socket, token: str = "", idle: float | None = None) -> None:
    """Serve until a signal comes, or until there was no reader for `idle` seconds."""
    from recover.runs.live.server import PageServer

    with PageServer(run_dir, listening, token) as server:
        if idle is not None:
            # Shutting down waits for the loop that this thread runs, so another thread does it.
            signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.finish).start())
            threading.Thread(target=_leave_when_idle, args=(server, idle), daemon=True).start()
        server.serve_forever(poll_interval=0.5)


def _leave_when_idle(server: object, idle: float) -> None:
    from recover.runs.live.server import PageServer

    assert isinstance(server, PageServer)
    while server.readers or time.monotonic() - server.last_request < idle:
        time.sleep(1.0)
    server.shutdown()


def main(run_dir: str, descriptor: str) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    os.nice(10)  # lower priority than the job
    listening = socket.socket(fileno=int(descriptor))
    serve(Path(run_dir), listening, os.environ.get(_TOKEN, ""), _IDLE)


if __name__ == "__main__":
    main(*sys.argv[1:])
