"""The errors of etcd in one table: which are retried, which need a new login, which are final, and
the remedies.

Etcd answers with gRPC's code and a text. The text decides first: some codes cover both kinds of
error (RESOURCE_EXHAUSTED: too many requests, or a full database), and some errors reach the gateway
without a code of their own (`auth: revision in header is old` comes as UNKNOWN, status 500).
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """The client's reaction to an error."""

    RETRY = "retry"  # ask this member later, or another one now, until the client's patience ends
    LOGIN = "log in again"  # the token is not valid any more; where no user is given, final
    FINAL = "final"  # the same request would be refused again


NO_SPACE = (
    "etcd has raised the alarm NOSPACE, so it takes no writes (`etcdctl alarm list` shows it): compact and defragment "
    "it (`etcdctl compact REVISION`, `etcdctl defrag`) or raise its --quota-backend-bytes, then `etcdctl alarm disarm`"
)
CORRUPT = (
    "etcd has raised the alarm CORRUPT: its members hold different data (`etcdctl alarm list` names the member); "
    "replace that member or restore a snapshot, then `etcdctl alarm disarm`"
)
NO_LEADER = "do a majority of its members run, and reach each other? (`etcdctl endpoint status --cluster`)"
OVERLOADED = "it has more requests than it can carry out: is its disk slow, or does somebody else flood it?"

# The first text that the error contains decides.
TEXTS: tuple[tuple[str, Kind, str], ...] = (
    ("invalid auth token", Kind.LOGIN, ""),
    ("revision in header is old", Kind.LOGIN, ""),  # users or roles have changed since the token was made
    ("revision of auth store is old", Kind.LOGIN, ""),
    ("user name is empty", Kind.LOGIN, ""),  # no token was sent: authentication was turned on meanwhile
    ("database space exceeded", Kind.RETRY, NO_SPACE),
    ("alarm:NOSPACE", Kind.RETRY, NO_SPACE),
    ("alarm:CORRUPT", Kind.FINAL, CORRUPT),
    ("corrupt cluster", Kind.FINAL, CORRUPT),
    ("too many requests", Kind.RETRY, OVERLOADED),
    ("request timed out", Kind.RETRY, OVERLOADED),  # also: "..., possibly due to previous leader failure"
    ("waiting for the applied index", Kind.RETRY, OVERLOADED),
    ("no leader", Kind.RETRY, NO_LEADER),
    ("not leader", Kind.RETRY, NO_LEADER),
    ("leader changed", Kind.RETRY, NO_LEADER),
    ("unhealthy cluster", Kind.RETRY, NO_LEADER),
    ("server stopped", Kind.RETRY, NO_LEADER),
    ("raft: stopped", Kind.RETRY, NO_LEADER),
    ("raft proposal dropped", Kind.RETRY, NO_LEADER),
    ("not supported for learner", Kind.RETRY, "this member does not vote yet; name the others as well"),
    ("watch canceled", Kind.RETRY, ""),
    ("request is too large", Kind.FINAL, "raise its --max-request-bytes"),
    ("too many operations in txn", Kind.FINAL, "raise its --max-txn-ops to 128 or more"),
    (
        "CommonName",
        Kind.FINAL,
        "where it has users and asks for certificates, show one whose subject has no CN, as /O=recover",
    ),
)

# gRPC's codes, for texts that are not in the table. UNKNOWN and INTERNAL are retried: that does no
# harm, since every write may be carried out twice, and one failing member must not end a job that
# has two others.
CODES: dict[int, Kind] = {
    1: Kind.RETRY,  # CANCELLED
    2: Kind.RETRY,  # UNKNOWN
    3: Kind.FINAL,  # INVALID_ARGUMENT
    4: Kind.RETRY,  # DEADLINE_EXCEEDED
    5: Kind.FINAL,  # NOT_FOUND
    6: Kind.FINAL,  # ALREADY_EXISTS
    7: Kind.FINAL,  # PERMISSION_DENIED
    8: Kind.RETRY,  # RESOURCE_EXHAUSTED
    9: Kind.FINAL,  # FAILED_PRECONDITION
    10: Kind.RETRY,  # ABORTED
    11: Kind.FINAL,  # OUT_OF_RANGE
    12: Kind.FINAL,  # UNIMPLEMENTED
    13: Kind.RETRY,  # INTERNAL
    14: Kind.RETRY,  # UNAVAILABLE
    15: Kind.FINAL,  # DATA_LOSS
    16: Kind.LOGIN,  # UNAUTHENTICATED
}
PERMISSION_DENIED = 7


def classify(code: int, status: int, said: str) -> tuple[Kind, str]:
    """The reaction to an error, and the remedy, if one is known.

    `code`: gRPC's, 0 if none came; `status`: HTTP's.
    """
    for text, kind, remedy in TEXTS:
        if text in said:
            return kind, remedy
    if code in CODES:
        return CODES[code], ""
    # The error is not etcd's: a proxy, or another program, has answered.
    if status == 404:
        return Kind.FINAL, "is this etcd 3.4 or later, with its JSON gateway on?"
    return (Kind.RETRY if status >= 500 or status in (408, 429) else Kind.FINAL), ""


def read_error(answer: object) -> tuple[int, str]:
    """The code and the text of an error as the gateway writes it: flat, or, in a stream, inside of
    `error`."""
    if not isinstance(answer, dict):
        return 0, str(answer)
    inner = answer["error"] if isinstance(answer.get("error"), dict) else answer
    code = inner.get("code") or inner.get("grpc_code") or 0
    said = inner.get("message") or inner.get("error") or inner
    return (code if isinstance(code, int) else 0), str(said)
