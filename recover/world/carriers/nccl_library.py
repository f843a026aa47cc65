"""The functions of NCCL that a carrier needs, from the library that torch has loaded.

All communicators are non-blocking: every call returns at once, and its progress is polled. So no
thread is inside NCCL while another one aborts the communicator, which would be undefined behaviour.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from recover.world.carriers.contract import CarrierError

ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
SUM, MAX = 0, 2
TYPES = {"int32": 2, "int64": 4, "float32": 7, "float64": 8}
# The first version whose settings have `blocking`; later versions accept it, too.
_MAGIC, _VERSION = 0xCAFEBEEF, 21400


class _Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * ID_BYTES)]


class _Settings(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]


class Nccl:
    """The library. A communicator is an opaque pointer of NCCL's."""

    def __init__(self) -> None:
        import torch  # loads the library, which is then found by its name

        if not torch.cuda.is_available():
            raise CarrierError(
                "carrier 'nccl' needs a GPU that torch can use; use carrier=mpi or carrier=gloo"
            )
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise CarrierError(
                f"carrier 'nccl': torch was built without NCCL, or it is not found ({error}); use carrier=mpi"
            ) from None
        self._library.ncclGetErrorString.restype = c_char_p
        self._library.ncclGetLastError.restype = c_char_p
        self._library.ncclGetLastError.argtypes = [c_void_p]
        made, settings = POINTER(c_void_p), POINTER(_Settings)
        self._library.ncclCommInitRankConfig.argtypes = [made, c_int, _Id, c_int, settings]
        # Two buffers, a count, a type and, but for a gather, an operation or a root; then
        # communicator and stream.
        gather: list[Any] = [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p]
        self._library.ncclAllGather.argtypes = gather
        self._library.ncclAllReduce.argtypes = [*gather[:4], c_int, *gather[4:]]
        self._library.ncclBroadcast.argtypes = [*gather[:4], c_int, *gather[4:]]
        # One buffer, a count, a type and a peer.
        self._library.ncclSend.argtypes = [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
        self._library.ncclRecv.argtypes = self._library.ncclSend.argtypes
        self._library.ncclCommAbort.argtypes = [c_void_p]
        self._library.ncclCommGetAsyncError.argtypes = [c_void_p, POINTER(c_int)]

    @property
    def version(self) -> str:
        number = c_int()
        self._library.ncclGetVersion(byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def new_id(self) -> bytes:
        """The address of a new group. Its root listens in this process."""
        made = _Id()
        self._check(self._library.ncclGetUniqueId(byref(made)))
        return ctypes.string_at(byref(made), ID_BYTES)

    def begin_group(self, address: bytes, size: int, index: int) -> int:
        """Begin to make a communicator, on the current device of this thread."""
        made, where = c_void_p(), _Id()
        ctypes.memmove(byref(where), address, ID_BYTES)
        settings = _Settings(ctypes.sizeof(_Settings), _MAGIC, _VERSION, 0)
        code = self._library.ncclCommInitRankConfig(byref(made), size, where, index, byref(settings))
        self._check(code, in_progress_too=True)
        assert made.value is not None
        return made.value

    def all_reduce(
        self, source: int, out: int, count: int, kind: str, operation: int, comm: int, stream: int
    ) -> None:
        code = self._library.ncclAllReduce(source, out, count, TYPES[kind], operation, comm, stream)
        self._check(code, comm, in_progress_too=True)

    def broadcast(self, root: int, data: int, count: int, kind: str, comm: int, stream: int) -> None:
        code = self._library.ncclBroadcast(data, data, count, TYPES[kind], root, comm, stream)
        self._check(code, comm, in_progress_too=True)

    def all_gather(self, source: int, out: int, count: int, kind: str, comm: int, stream: int) -> None:
        code = self._library.ncclAllGather(source, out, count, TYPES[kind], comm, stream)
        self._check(code, comm, in_progress_too=True)

    def exchange(
        self,
        out: Sequence[tuple[int, int, int]],
        into: Sequence[tuple[int, int, int]],
        kind: str,
        comm: int,
        stream: int,
    ) -> None:
        """Send to and receive from several peers in one group of calls. `out`, `into`: peer, buffer
        and count of each."""
        self._check(self._library.ncclGroupStart())
        try:
            for peer, data, count in out:
                code = self._library.ncclSend(data, count, TYPES[kind], peer, comm, stream)
                self._check(code, comm, in_progress_too=True)
            for peer, data, count in into:
                code = self._library.ncclRecv(data, count, TYPES[kind], peer, comm, stream)
                self._check(code, comm, in_progress_too=True)
        finally:  # while a group of calls is open, no call of this thread begins, in any communicator
            ended = self._library.ncclGroupEnd()
        self._check(ended, comm, in_progress_too=True)

    def is_through(self, comm: int) -> bool:
        """Whether the last call has been enqueued on the device.

        Raises CarrierError if the group is broken.
        """
        state = c_int()
        self._check(self._library.ncclCommGetAsyncError(comm, byref(state)), comm)
        self._check(state.value, comm, in_progress_too=True)
        return state.value == SUCCESS

    def abort(self, comm: int) -> None:
        """End all kernels of this group. The communicator does not exist afterwards."""
        self._library.ncclCommAbort(comm)

    def _check(self, code: int, comm: int | None = None, in_progress_too: bool = False) -> None:
        if code == SUCCESS or (in_progress_too and code == IN_PROGRESS):
            return
        what = self._library.ncclGetErrorString(code).decode()
        more = (self._library.ncclGetLastError(comm) or b"").decode().strip().rpartition("\n")[2]
        raise CarrierError(f"NCCL {self.version}: {what}" + (f" ({more})" if more else ""))
