"""Reports the death of a rank to the Open MPI of this process, as mpirun does it.

mpirun reports a death when it has reaped the process. A rank of the same host that sees earlier that
the process executes nothing any more (`recover.world.liveness.exiting`) reports it through PMIx, the
interface between mpirun and Open MPI. A second report of the same death has no effect.
"""

from __future__ import annotations

import ctypes

from recover.job.process import mpi_namespace

_TERMINATED = -200  # PMIX_ERR_PROC_TERM_WO_SYNC: a process ended that had not finalised MPI
_NAME = b"PMIX_ERR_PROC_TERM_WO_SYNC"
_AFFECTED = b"pmix.evproc"  # PMIX_EVENT_AFFECTED_PROC
_PROC = 22  # PMIX_PROC, the type of its value
_THIS_PROCESS = 7  # PMIX_RANGE_PROC_LOCAL


class _Process(ctypes.Structure):
    """pmix_proc_t"""

    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """pmix_value_t, whose union has 24 bytes."""

    _fields_ = (("type", ctypes.c_uint16), ("process", ctypes.c_void_p), ("rest", ctypes.c_uint64 * 2))


class _Info(ctypes.Structure):
    """pmix_info_t"""

    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class DeathReports:
    """For the process of one rank, after MPI was initialised.

    Without PMIx's library, or with one that numbers its events otherwise, nothing is reported here:
    then Open MPI learns of deaths from mpirun alone.
    """

    def __init__(self, rank: int) -> None:
        self._me = _Process(mpi_namespace().encode(), rank)
        self._library = _library() if self._me.namespace else None

    def report(self, rank: int) -> None:
        """Mark this rank as failed in Open MPI. Any thread may call this, also while another thread waits
        in MPI. Returns in less than a millisecond."""
        if self._library is None:
            return
        dead = _Process(self._me.namespace, rank)
        value = _Value(_PROC, ctypes.cast(ctypes.pointer(dead), ctypes.c_void_p))
        info = _Info(_AFFECTED, 0, value)
        # Without a callback the call returns when PMIx has passed the event on, so it may use our memory.
        self._library.PMIx_Notify_event(
            _TERMINATED,
            ctypes.byref(self._me),
            ctypes.c_uint8(_THIS_PROCESS),
            ctypes.byref(info),
            ctypes.c_size_t(1),
            None,
            None,
        )


def _library() -> ctypes.CDLL | None:
    """The PMIx library that Open MPI has loaded into this process, if it is one that we know."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libpmix.so" in line}
        library = ctypes.CDLL(paths.pop())
        library.PMIx_Error_string.restype = ctypes.c_char_p
        known = library.PMIx_Error_string(_TERMINATED) == _NAME and library.PMIx_Notify_event is not None
    except (OSError, KeyError, AttributeError):
        return None
    return library if known else None
