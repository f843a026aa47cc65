"""Detection of lost connections: by default TCP waits for a quarter of an hour, and a reader for
ever."""

from __future__ import annotations

import socket

PROBES = 3  # without an answer, after which an idle connection is lost


def detect_connection_loss(opened: socket.socket, seconds: float) -> None:
    """Have the kernel close `opened` when the other end has not answered it for about `seconds`.

    Both options are needed: TCP_USER_TIMEOUT acts on what was sent and not acknowledged, keepalive
    on a connection on which this end only waits. The kernel of the other end answers, however slow
    its process is. Sockets of other families than the internet's are left alone.
    """
    if opened.family not in (socket.AF_INET, socket.AF_INET6):
        return
    pause = max(1, int(seconds / (PROBES + 1)))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
