"""Broken links inside a replica: which connections the kernel watches."""

from __future__ import annotations

import socket

from recover.parallel.replica_links import detect_losses


def timeout_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_connections_to_the_hosts_of_a_replica_are_watched_whenever_they_are_made() -> None:
    """A connection that is made only after the first search is watched, too; other addresses are left alone."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as early,
        socket.socket() as late,
    ):
        known = detect_losses({"10.1.1.1"}, 8.0, {})
        assert timeout_of(early) == 0
        known = detect_losses({"127.0.0.1"}, 8.0, {})
        assert (timeout_of(early), timeout_of(late)) == (8000, 0)
        early.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1)
        late.connect(listener.getsockname())
        detect_losses({"127.0.0.1"}, 8.0, known)
        assert (timeout_of(early), timeout_of(late)) == (1, 8000)
        assert late.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
