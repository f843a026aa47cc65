"""A real S3 server (moto, in a process of its own) behind a gate that closes, or stops in the middle of an upload."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from patience import wait_until

BUCKET = "checkpoints"
_SETUP = 4  # requests before the server asks for credentials: user, key, policy, bucket


class Gate:
    """Forwards TCP connections to a port of this host."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.is_open = True
        self.stalled = threading.Event()  # an upload is being held
        self._hold: int | None = None  # bytes of an upload after which it is held
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_uploads(self, after: int) -> None:
        """Stop forwarding an upload of a large file after so many bytes."""
        self.stalled.clear()
        self._hold = after

    def release(self) -> None:
        """Cut the uploads that are held, and forward all others."""
        self._hold = None

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self.is_open:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink, is_request in ((client, server, True), (server, client, False)):
                    pump = threading.Thread(target=self._pump, args=(source, sink, is_request), daemon=True)
                    pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        sent, is_part = 0, False
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if not self.is_open:
                    break
                if is_request and data.startswith((b"PUT ", b"GET ", b"HEAD ", b"POST ", b"DELETE ")):
                    sent, is_part = 0, data.startswith(b"PUT ") and b"part-" in data.split(b"\r\n")[0]
                sent += len(data)
                if is_part and self._hold is not None and sent > self._hold:
                    self.stalled.set()
                    wait_until(lambda: self._hold is None)
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class S3Server:
    """`environment`: variables that let a process use it. The bucket exists."""

    def __init__(self, place: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with open(place / "s3.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(_SETUP)},
                stdout=log,
                stderr=log,
            )
        self._direct = f"http://127.0.0.1:{port}"
        assert wait_until(lambda: self._answers(port)), (place / "s3.log").read_text()
        self.gate = Gate(port)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.gate.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.environment |= self._credentials()

    def close(self) -> None:
        self.gate.close()
        self._process.kill()
        self._process.wait()

    def client(self, service: str = "s3") -> Any:
        """A client of boto3 that does not go through the gate."""
        import boto3

        return boto3.client(
            service,
            endpoint_url=self._direct,
            region_name="us-east-1",
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
        )

    def names(self, prefix: str) -> list[str]:
        found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
        return [one["Key"].removeprefix(f"{prefix}/") for one in found.get("Contents", ())]

    def complete(self, prefix: str) -> list[int]:
        """The steps of the checkpoints with a marker."""
        names = self.names(prefix)
        return sorted(int(name.split("-")[1]) for name in names if name.endswith("/complete"))

    def _credentials(self) -> dict[str, str]:
        iam = self.client("iam")
        iam.create_user(UserName="trainer")
        key = iam.create_access_key(UserName="trainer")["AccessKey"]
        policy = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
        iam.put_user_policy(UserName="trainer", PolicyName="s3", PolicyDocument=policy)
        self.client().create_bucket(Bucket=BUCKET)
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    @staticmethod
    def _answers(port: int) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False
