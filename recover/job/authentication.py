"""Message authentication with the job's token: HMAC-SHA256 over a purpose, the place of a message and its bytes.

A process without the token can read what lies in an etcd that is not encrypted, but can write nothing there that a
member accepts: neither bytes of its own, nor a copy of a member's bytes in another place. The place names job, run,
kind, rank and, where there is one, the epoch. Whatever else must not be exchanged is part of the bytes.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

MAC_BYTES = 32


class Authenticator:
    """Signs and checks messages of one purpose. Keys of different purposes are independent of each other."""

    def __init__(self, token: str, purpose: str) -> None:
        self._key = hmac.digest(token.encode(), b"recover " + purpose.encode(), "sha256")

    def mac(self, place: str, data: bytes) -> bytes:
        # The length keeps place and data apart: no two pairs of them are the same message.
        where = place.encode()
        return hmac.digest(self._key, len(where).to_bytes(8, "little") + where + data, "sha256")

    def sign(self, place: str, data: bytes) -> bytes:
        return self.mac(place, data) + data

    def opened(self, place: str, signed: bytes) -> bytes | None:
        """The data, or None if they were not signed for this place with the job's token."""
        mac, data = signed[:MAC_BYTES], signed[MAC_BYTES:]
        return data if hmac.compare_digest(mac, self.mac(place, data)) else None


def make_token_file(path: Path) -> Path:
    """A file with a new token, for this user's eyes only, for `--token-file`. One that is there already is kept."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path
