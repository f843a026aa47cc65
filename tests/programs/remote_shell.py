"""Stands in for ssh between the hosts of a lab: `serve` runs what it is sent, `HOST COMMAND...` sends it there."""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys

PORT = 2222


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        command = self.rfile.readline().decode()
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.connection, "stderr": self.connection}
        subprocess.run(["sh", "-c", command], **streams)  # type: ignore[call-overload]


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


def main(host: str, *command: str) -> None:
    if host == "serve":
        print("up", flush=True)
        Server((socket.gethostbyname(socket.gethostname()), PORT), Handler).serve_forever()
    with socket.create_connection((host, PORT)) as line:
        line.sendall(f"cd {os.getcwd()} && {' '.join(command)}\n".encode())
        while data := line.recv(1 << 16):
            os.write(1, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
