"""Files byte by byte: what no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q",
         F64: "<d"}  # fmt: skip


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: float | str | bytes) -> bytes:
    """One of the metadata; of an array or an unknown type, `value` is what follows the type."""
    if kind in FORMS:
        raw = struct.pack(FORMS[kind], value)
    else:
        raw = text(value) if kind == STRING else value  # type: ignore[arg-type, assignment]
    return text(key) + struct.pack("<I", kind) + raw


def array(kind: int, length: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + raw


@dataclass
class Tensor:
    """A tensor's header, `shape` with the innermost dimension first, as the file has it."""

    name: str | bytes
    shape: Sequence[int] = (4,)
    kind: int = 0
    offset: int = 0
    dimensions: int | None = None

    def header(self) -> bytes:
        count = len(self.shape) if self.dimensions is None else self.dimensions
        sizes = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        return text(self.name) + struct.pack("<I", count) + sizes + struct.pack("<IQ", self.kind, self.offset)


@dataclass
class File:
    """A whole file. Counts are those of what there is, unless given; `data` begins at a multiple of `align`."""

    entries: Sequence[bytes] = ()
    tensors: Sequence[Tensor] = ()
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    counts: tuple[int, int] | None = None
    align: int = 32

    def raw(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.entries))
        head = self.magic + self.version + struct.pack("<QQ", *counts) + b"".join(self.entries)
        head += b"".join(tensor.header() for tensor in self.tensors)
        return head + bytes(-len(head) % self.align) + self.data
