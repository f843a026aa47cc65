"""One connection to a member of etcd: the part of HTTP that its JSON gateway speaks, in one packet
each way.

An agreement takes a few such requests, so their cost matters: the standard library's client spends
most of its time on headers that are not used.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping

from recover.job.sockets import detect_connection_loss

LOST = 10.0  # seconds; requests have limits of their own, far shorter
LONGEST = 100  # characters of a socket's path that the kernel takes


class HttpConnection:
    """A connection to `host` and `port`, or to a Unix socket, whose path is the host.

    Every failure is an OSError; the connection cannot be used any more afterwards.
    """

    def __init__(self, host: str, port: int, timeout: float, tls: ssl.SSLContext | None = None) -> None:
        if host.startswith("/"):
            self._host, opened = "localhost", _connected(host, timeout)
        else:
            self._host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            opened = socket.create_connection((host, port), timeout)
        try:
            if opened.family != socket.AF_UNIX:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                detect_connection_loss(opened, LOST)
            self._socket = opened if tls is None else tls.wrap_socket(opened, server_hostname=host)
        except BaseException:
            opened.close()
            raise
        self._file = self._socket.makefile("rb")
        self._left = b""  # of a stream: the part of the next line that has arrived

    def limit(self, seconds: float) -> None:
        """Set the timeout of all later reads and writes."""
        self._socket.settimeout(seconds)

    def ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the answer."""
        self.post(path, body, headers)
        status, length, chunked = self._head()
        if chunked:
            parts = []
            while part := self._chunk():
                parts.append(part)
            return status, b"".join(parts)
        data = self._file.read() if length is None else self._file.read(length)
        if length is not None and len(data) < length:
            raise ConnectionError(f"{len(data)} bytes of an answer of {length}")
        return status, data

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        self._socket.sendall(head.encode("latin-1") + body)

    def begin_stream(self) -> None:
        """After `post`: wait until the answer begins."""
        status, _, chunked = self._head()
        if status != 200 or not chunked:
            raise ConnectionError(f"status {status} instead of a stream")

    def readline(self) -> bytes:
        """The next line of a stream; empty at its end."""
        while b"\n" not in self._left:
            part = self._chunk()
            if not part:
                return b""
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        return line

    def shut_down(self) -> None:
        """Wake the thread that waits on it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _head(self) -> tuple[int, int | None, bool]:
        """The status, the length of the answer if it is given, and whether it comes in chunks."""
        try:
            status = int(self._line().split(None, 2)[1])
            length, chunked = None, False
            while line := self._line():
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
                elif name.lower() == b"transfer-encoding":
                    chunked = value.strip().lower() == b"chunked"
        except (ValueError, IndexError):
            raise ConnectionError("not an answer in HTTP") from None
        return status, length, chunked

    def _chunk(self) -> bytes:
        try:
            size = int(self._line().partition(b";")[0], 16)
        except ValueError:
            raise ConnectionError("not a chunk of an answer") from None
        data = self._file.read(size + 2)
        if len(data) < size + 2:
            raise ConnectionError("an answer was cut off")
        return data[:size]

    def _line(self) -> bytes:
        line = self._file.readline(1 << 16)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        return line.rstrip(b"\r\n")


def _connected(path: str, timeout: float) -> socket.socket:
    """Connect to a Unix socket.

    One whose path is too long for the kernel is reached through its directory.
    """
    opened = socket.socket(socket.AF_UNIX)
    directory = os.open(os.path.dirname(path), os.O_PATH) if len(path) > LONGEST else None
    try:
        opened.settimeout(timeout)
        name = path if directory is None else f"/proc/self/fd/{directory}/{os.path.basename(path)}"
        opened.connect(name)
        return opened
    except BaseException:
        opened.close()
        raise
    finally:
        if directory is not None:
            os.close(directory)
