"""The page beside a job. Until somebody asks for it there is a socket and a thread that sleeps; then a process serves.

What readers do happens in that process. It goes when nobody has looked for a while, and it dies with whoever started
it; if it dies of anything else, the next request starts another one.
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

FIRST_PORT, LAST_PORT = 8470, 8489  # where a page is looked for; if all are taken, anywhere
ADDRESS = "page.url"  # in the run directory, while the page is there
_TOKEN = "RECOVER_PAGE_TOKEN"
_IDLE = 300.0  # seconds without a reader
_LOOK = 1.0  # seconds between looks at the process: one that cannot live is not started more often than that
_PR_SET_PDEATHSIG = 1


def listen(port: int | None, bind: str = "127.0.0.1") -> socket.socket:
    """A socket on this port; None: on one of the usual ones, or on any. Raises OSError, ValueError."""
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
    """Needed where others than this host's users can ask. Not the job's own: whoever may look may not take part."""
    return "" if ip_address(bind).is_loopback else secrets.token_urlsafe(24)


def address(listening: socket.socket, token: str) -> str:
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = socket.gethostname()
    elif ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}/" + (f"?token={token}" if token else "")


@contextmanager
def page_beside(run_dir: Path, listening: socket.socket, token: str) -> Iterator[str]:
    """While inside, the page of this run is there; gives its address."""
    place = run_dir / ADDRESS
    told = address(listening, token)
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(told + "\n")
    except OSError:
        pass  # a full disk: the page is there all the same
    keeper = _Keeper(run_dir, listening, token)
    try:
        yield told
    finally:
        keeper.stop()
        FILES.remove(place)


class _Keeper:
    """Starts the process when the first one asks, and again if it has gone."""

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
            # Of this thread's own: the process dies with the thread that started it.
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
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            ) as process:
                while select.select([self._wake], [], [], _LOOK)[0] == []:
                    if process.poll() is not None:
                        break
                else:
                    process.kill()
                    return


def serve(run_dir: Path, listening: socket.socket, token: str = "", idle: float | None = None) -> None:
    """Until a signal comes, or nobody has looked for `idle` seconds."""
    from recover.runs.live.server import PageServer

    with PageServer(run_dir, listening, token) as server:
        if idle is not None:
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
    os.nice(10)  # the job comes first
    listening = socket.socket(fileno=int(descriptor))
    serve(Path(run_dir), listening, os.environ.get(_TOKEN, ""), _IDLE)


if __name__ == "__main__":
    main(*sys.argv[1:])
