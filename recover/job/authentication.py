"""Message authentication with the job's token: HMAC-SHA256 over a purpose, the place of a message
and its bytes.

A process without the token can write nothing that a member accepts: neither bytes of its own, nor a
copy of a member's bytes in another place. The place names job, run, kind, rank and, where there is
one, the epoch. All else that must not be exchanged is part of the bytes.

Values in etcd are encrypted, too: they hold addresses of groups, and a process that knows the
address of an NCCL group can join it. The same data in the same place give the same bytes, so that
etcd can compare them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

MAC_BYTES = 32


class Authenticator:
    """Signs and checks messages of one purpose. Keys of different purposes are independent of each
    other."""

    def __init__(self, token: str, purpose: str) -> None:
        key, hiding = (
            hmac.digest(token.encode(), f"recover {purpose} {use}".encode(), "sha256")
            for use in ("authentication", "encryption")
        )
        # Hashes that have taken in their keys, and are copied for each message: a new one costs half as much again.
        self._mac, self._stream = hmac.new(key, digestmod="sha256"), hashlib.shake_256(hiding)

    def mac(self, place: str, data: bytes) -> bytes:
        # The length keeps place and data apart: no two pairs of them are the same message.
        where, mac = place.encode(), self._mac.copy()
        mac.update(len(where).to_bytes(8, "little") + where + data)
        return mac.digest()

    def sign(self, place: str, data: bytes) -> bytes:
        return self.mac(place, data) + data

    def opened(self, place: str, signed: bytes) -> bytes | None:
        """The data, or None if they were not signed for this place with the job's token."""
        mac, data = signed[:MAC_BYTES], signed[MAC_BYTES:]
        return data if hmac.compare_digest(mac, self.mac(place, data)) else None

    def seal(self, place: str, data: bytes) -> bytes:
        """Sign as `sign` does, and encrypt: a process without the token cannot read the data."""
        mac = self.mac(place, data)
        return mac + self._hidden(mac, data)

    def unsealed(self, place: str, sealed: bytes) -> bytes | None:
        """The data, or None if they were not sealed for this place with the job's token."""
        mac = sealed[:MAC_BYTES]
        return self.opened(place, mac + self._hidden(mac, sealed[MAC_BYTES:]))

    def _hidden(self, mac: bytes, data: bytes) -> bytes:
        """Encrypt or decrypt. The MAC is the nonce, as in SIV (RFC 5297): no two messages share a
        key stream."""
        stream = self._stream.copy()
        stream.update(mac)
        hidden = int.from_bytes(data) ^ int.from_bytes(stream.digest(len(data)))
        return hidden.to_bytes(len(data))


def make_token_file(path: Path) -> Path:
    """Write a new token to a file that only this user can read, for `--token-file`. An existing
    file is kept."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path
