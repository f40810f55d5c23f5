"""The transfer buffer holds KV between two workers: one puts it down, another copies it, then it is freed.

A parcel is plain data, so that a header can name it; only who picks it up touches the bytes.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)
Parcel = dict[str, Any]
ALIGN = 64  # bytes; every tensor of a segment starts at a multiple


class Lost(Exception):
    """The parcel is no longer there."""


class TransferBuffer(Protocol):
    """Carries tensors between workers. Parcels outlive the worker that put them down."""

    def put(self, tensors: Sequence[Tensor]) -> Parcel:
        """Put tensors down. Raises OSError where there is no room."""
        ...

    def get(self, parcel: Parcel) -> list[Tensor]:
        """The tensors, to be copied from before the parcel is dropped. Raises Lost."""
        ...

    def drop(self, parcel: Parcel) -> None:
        """Free a parcel; nothing happens if that was done before."""
        ...

    def clear(self, owner: str, keep: Sequence[Parcel]) -> None:
        """Free what a dead worker has put down, but for the parcels to `keep`."""
        ...


class InlineBuffer:
    """The transfer buffer within one process: nothing is copied."""

    def __init__(self, owner: str = "router") -> None:
        self.owner = owner
        self.parcels: dict[str, list[Tensor]] = {}
        self._numbers = itertools.count()

    def at(self, owner: str) -> InlineBuffer:
        """The same shelf as another one uses it."""
        twin = InlineBuffer(owner)
        twin.parcels = self.parcels
        return twin

    def put(self, tensors: Sequence[Tensor]) -> Parcel:
        name = f"{self.owner}.{next(self._numbers)}"
        self.parcels[name] = list(tensors)
        return {"name": name}

    def get(self, parcel: Parcel) -> list[Tensor]:
        if parcel["name"] not in self.parcels:
            raise Lost(f"parcel {parcel['name']} is gone")
        return self.parcels[parcel["name"]]

    def drop(self, parcel: Parcel) -> None:
        self.parcels.pop(parcel["name"], None)

    def clear(self, owner: str, keep: Sequence[Parcel]) -> None:
        kept = {parcel["name"] for parcel in keep}
        for name in [name for name in self.parcels if name.startswith(f"{owner}.") and name not in kept]:
            del self.parcels[name]


class SharedMemoryBuffer:
    """Between processes of one machine: a file in shared memory per parcel, `{run}.{owner}.{number}`.

    `run` tells apart the servers of one machine. Files are made and removed, never changed after `put`.
    """

    def __init__(self, run: str, owner: str) -> None:
        self.run, self.owner = run, owner
        self._numbers = itertools.count()

    def put(self, tensors: Sequence[Tensor]) -> Parcel:
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += -(-tensor.nbytes // ALIGN) * ALIGN
        name = f"{self.run}.{self.owner}.{next(self._numbers)}"
        memory = segment(name, max(total, ALIGN), create=True)
        for tensor, offset in zip(tensors, offsets):
            _view(memory, tensor.dtype, tensor.shape, offset).copy_(tensor)
        kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape), o] for t, o in zip(tensors, offsets)]
        return {"segment": name, "bytes": max(total, ALIGN), "tensors": kinds}

    def get(self, parcel: Parcel) -> list[Tensor]:
        try:
            memory = segment(parcel["segment"], parcel["bytes"], create=False)
        except (OSError, RuntimeError) as error:
            raise Lost(f"segment {parcel['segment']} is gone") from error
        return [_view(memory, getattr(torch, kind), shape, offset) for kind, shape, offset in parcel["tensors"]]

    def drop(self, parcel: Parcel) -> None:
        (folder() / parcel["segment"]).unlink(missing_ok=True)

    def clear(self, owner: str, keep: Sequence[Parcel]) -> None:
        kept = {parcel["segment"] for parcel in keep}
        for path in folder().glob(f"{self.run}.{owner}.*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _view(memory: Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    n_bytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + n_bytes].view(dtype).view(list(shape))


def folder() -> Path:
    """Returns the folder of segments: shared memory, or that of temporary files where there is none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def segment(name: str, n_bytes: int, create: bool) -> Tensor:
    """A mapped file as bytes, uint8 [n_bytes], shared with whoever maps it. It lives until the last one lets go.

    Raises FileNotFoundError if it should be there and is not, OSError if there is no room for it.
    """
    path = folder() / name
    file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            os.posix_fallocate(file, 0, n_bytes)  # now, not as a fault while it is filled
        elif (size := os.fstat(file).st_size) != n_bytes:
            raise FileNotFoundError(f"{path} has {size} bytes, not {n_bytes}")
        # not torch.from_file, which makes anew what was removed a moment ago
        return torch.frombuffer(mmap.mmap(file, n_bytes), dtype=torch.uint8)
    except OSError:
        if create:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def sweep(prefix: str) -> int:
    """Remove all segments whose names start with `prefix`, for those that died holding them. -> how many."""
    found = list(folder().glob(f"{prefix}*"))
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)
