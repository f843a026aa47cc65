"""How a worker sends a microbatch: large tensors in shared memory, as torch does, small ones in the message itself.

Shared memory costs a file descriptor and half a millisecond of the rank's time per tensor, however small: most of the
cost of reading if microbatches are rows of tokens.
"""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

SMALL = 64 << 10  # bytes of a tensor's memory


class _Memory:
    """The storage of one or several tensors: tensors that share it still do after they have arrived."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        whole = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        return _memory, (whole.numpy().tobytes(),)


def _memory(content: bytes) -> _Memory:
    found = _Memory(torch.UntypedStorage(len(content)))
    if content:
        whole = torch.empty(0, dtype=torch.uint8).set_(found.storage)
        whole.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return found


def _tensor(memory: _Memory, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.storage, offset, shape, stride)


class _Packer(ForkingPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._memories: dict[int, _Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        value = value.resolve_conj().resolve_neg()  # torch's own way loses these flags
        storage = value.untyped_storage()
        if storage.nbytes() > SMALL:
            return reduce_tensor(value)
        memory = self._memories.setdefault(storage._cdata, _Memory(storage))
        place = value.storage_offset(), tuple(value.shape), value.stride()
        return _tensor, (memory, value.dtype, *place)


def pack(value: Any) -> bytes:
    """The bytes for `Connection.send_bytes`; the receiver calls `recv`."""
    file = io.BytesIO()
    _Packer(file).dump(value)
    return file.getvalue()
