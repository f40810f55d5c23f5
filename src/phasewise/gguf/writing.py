"""The container, written: version 3, little endian, as `container.py` reads it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from phasewise.gguf.blocks import TYPES, Bytes
from phasewise.gguf.container import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, NUMBERS, STRING, TextArray

TYPE_OF = {kind.name: number for number, kind in TYPES.items()}
U32, I32, F32, U64, I64 = 4, 5, 6, 10, 11
ARRAYS = {np.dtype(form): kind for kind, form in NUMBERS.items() if kind != BOOL}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a type (Q4_0 ..), `shape` as torch has it; `data` gives its bytes piece by piece when it is
    written."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: Callable[[], Iterator[Bytes]]

    @property
    def nbytes(self) -> int:
        return TYPES[TYPE_OF[self.type]].bytes_of(self.shape)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> None:
    """Write a file that is there whole or not at all."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        at = 0
        for tensor in tensors:
            sizes = tensor.shape[::-1]
            file.write(_text(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            file.write(struct.pack("<IQ", TYPE_OF[tensor.type], at))
            at += -(-tensor.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        _fill(file)
        for tensor in tensors:
            written = 0
            for piece in tensor.data():
                file.write(np.ascontiguousarray(piece).data)
                written += piece.nbytes
            assert written == tensor.nbytes, f"{tensor.name}: {written} bytes of {tensor.nbytes}"
            _fill(file)
    fresh.replace(path)


def _fill(file: BinaryIO) -> None:
    """Up to the next multiple of the alignment."""
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def _text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A value of the metadata with its type: numbers in 32 bits, where they fit."""
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, (list, TextArray)):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        kind = BOOL if value.dtype == bool else ARRAYS[value.dtype]
        return struct.pack("<IIQ", ARRAY, kind, value.size) + value.tobytes()
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    small = -(1 << 31) <= value < 1 << 32
    kind = (U32 if small else U64) if value >= 0 else (I32 if small else I64)
    return struct.pack("<I", kind) + struct.pack(NUMBERS[kind], value)
