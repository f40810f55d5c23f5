"""The container: a file's header, metadata and tensors, checked whole before anything large is made.

Layout (version 2 and 3, little endian): magic, version, counts of tensors and of metadata; metadata as key, type and
value; for each tensor name, shape, type and offset; then, aligned, the data. Nothing here is believed: every length is
held against what is left of the file first.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasewise.errors import UserError
from phasewise.gguf.blocks import TYPES, BlockType

MAGIC, VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT = 32
NUMBERS = {  # type id -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
BOOL, STRING, ARRAY = 7, 8, 9
LENGTH = struct.Struct("<Q")  # of a text, before it
MOST_DIMENSIONS = 4
LONGEST_KEY = 65_535  # bytes, of a key or the name of a tensor
MOST = (1 << 31) - 1  # of any size that metadata give
NORESERVE = 0x4000  # Linux: a file larger than memory may be mapped so that it could be written to
AROUND = 1 << 21  # bytes, a power of 2: Linux maps up to so many where one is read of a file that it has in memory


class BrokenFile(UserError):
    """The file is not what it says it is; the message names the file, what is wrong, and the fix."""


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor. `shape` as torch has it, rows first; `start` and `bytes` of its data in the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    bytes: int


class _Cursor:
    """Reads forward in a file's bytes, never past their end."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data, self.path, self.at, self.end = data, path, 0, len(data)

    def fail(self, what: str) -> BrokenFile:
        return BrokenFile(f"{self.path} is not a sound GGUF file: {what}. Download or export it again.")

    def need(self, count: int, what: str) -> None:
        if count > self.end - self.at:
            raise self.fail(f"it ends within {what} ({count:,} bytes wanted at {self.at:,}, {self.end:,} in all)")

    def number(self, form: str, what: str) -> Any:
        size = struct.calcsize(form)
        self.need(size, what)
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def skip(self, what: str, most: int | None = None) -> int:
        """Passes over a text, and returns its length in bytes."""
        length: int = self.number("<Q", what)
        if most is not None and length > most:
            raise self.fail(f"{what} is {length:,} bytes long, and {most:,} are the most")
        self.need(length, what)
        self.at += length
        return length

    def raw(self, what: str, most: int | None = None) -> bytes:
        length = self.skip(what, most)
        return self.data[self.at - length : self.at]

    def text(self, what: str, most: int | None = None) -> str:
        raw = self.raw(what, most)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 ({error.reason} at byte {error.start})") from error


class TextArray:
    """An array of texts as the file has it, each after its length: `raw`. A list of them would take ten times the
    memory. They come as bytes, since old vocabularies are not all UTF-8."""

    def __init__(self, raw: bytes, count: int) -> None:
        self._raw, self._count = raw, count

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextArray:
        raw = [each.encode() for each in texts]
        return cls(b"".join(LENGTH.pack(len(each)) + each for each in raw), len(raw))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        at = 0
        for _ in range(self._count):
            (length,) = LENGTH.unpack_from(self._raw, at)
            at += LENGTH.size + length
            yield self._raw[at - length : at]

    def __repr__(self) -> str:
        return repr(list(itertools.islice(self, 9)))


class GGUFFile:
    """One file: `metadata` by key, `tensors` by name. Raises BrokenFile or UserError; keeps the file mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _mapped(path)
        cursor = _Cursor(self._map, path)
        if cursor.end < 24 or self._map[:4] != MAGIC:
            raise BrokenFile(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}. "
                             "Pass a .gguf file, or a directory in Hugging Face layout.")  # fmt: skip
        cursor.at = 4
        version = cursor.number("<I", "its version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = (
                "big-endian, and only little-endian" if swapped in VERSIONS else f"version {version}, and only 2 and 3"
            )
            raise UserError(f"{path} is GGUF {kind} files can be read. Convert it with the tools it was made with.")
        tensors, entries = cursor.number("<Q", "its counts"), cursor.number("<Q", "its counts")
        self._believe(cursor, tensors, "tensors", 24)
        self._believe(cursor, entries, "entries of metadata", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.text("a key of the metadata", LONGEST_KEY)
            if key in self.metadata:
                raise cursor.fail(f"the metadata has {key!r} twice")
            self.metadata[key] = self._value(cursor, cursor.number("<I", f"the type of {key}"), key)
        self.tensors = self._tensors(cursor, tensors)

    @staticmethod
    def _believe(cursor: _Cursor, count: int, what: str, least: int) -> None:
        if count > (cursor.end - cursor.at) // least:
            raise cursor.fail(f"it claims {count:,} {what}, more than {cursor.end:,} bytes can hold")

    def _value(self, cursor: _Cursor, kind: int, key: str) -> Any:
        if kind in NUMBERS:
            value = cursor.number(NUMBERS[kind], key)
            return bool(value) if kind == BOOL else value
        if kind == STRING:
            return cursor.text(key)
        if kind != ARRAY:
            raise cursor.fail(f"{key} is of the unknown type {kind}")
        inner, length = cursor.number("<I", key), cursor.number("<Q", key)
        if inner in NUMBERS:
            dtype = np.dtype(NUMBERS[inner])
            cursor.need(length * dtype.itemsize, key)
            found: NDArray[Any] = np.frombuffer(
                cursor.data, dtype, length, cursor.at
            ).copy()  # not to hold the file open
            cursor.at += length * dtype.itemsize
            return found.astype(bool) if inner == BOOL else found
        if inner != STRING:
            raise cursor.fail(f"{key} is an array of the type {inner}; only numbers and strings can be in one")
        self._believe(cursor, length, f"strings in {key}", 8)
        start = cursor.at
        for _ in range(length):
            cursor.skip(key)
        return TextArray(cursor.data[start : cursor.at], length)

    def _tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        headers = [self._header(cursor) for _ in range(count)]
        align = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(align) is not int or align < 8 or align & (align - 1) or align > 1 << 20:
            raise cursor.fail(f"general.alignment is {align!r:.60}; it must be a power of two from 8 on")
        start = -(-cursor.at // align) * align
        found: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in headers:
            if name in found:
                raise cursor.fail(f"it has the tensor {name} twice")
            if offset % align:
                raise cursor.fail(f"the tensor {name} begins at {offset:,}, not at a multiple of {align}")
            size = kind.bytes_of(shape)
            if start + offset + size > cursor.end:
                raise cursor.fail(f"the tensor {name} of {size:,} bytes at {start + offset:,} goes past its end, "
                                  f"{cursor.end:,}: the download is incomplete")  # fmt: skip
            found[name] = TensorInfo(name, shape, kind, start + offset, size)
        last: TensorInfo | None = None
        for info in sorted(found.values(), key=lambda info: info.start):
            if last is not None and info.start < last.start + last.bytes:
                raise cursor.fail(f"the tensors {last.name} and {info.name} overlap")
            last = info
        return found

    def _header(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = cursor.text("the name of a tensor", LONGEST_KEY)
        dimensions = cursor.number("<I", name)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise cursor.fail(f"the tensor {name} has {dimensions} dimensions; 1 to {MOST_DIMENSIONS} can be")
        shape = tuple(cursor.number("<Q", name) for _ in range(dimensions))[::-1]
        kind, offset = cursor.number("<I", name), cursor.number("<Q", name)
        if kind not in TYPES:
            known = ", ".join(sorted(each.name for each in TYPES.values()))
            raise UserError(f"{self.path}: the tensor {name} is of the type {kind}, which cannot be read. Take a file "
                            f"in one of {known}.")  # fmt: skip
        if any(not 0 < size <= cursor.end * 2 * TYPES[kind].values for size in shape):
            raise cursor.fail(f"the tensor {name} has the shape {list(shape)}")
        if shape[-1] % TYPES[kind].values:
            raise cursor.fail(f"the tensor {name} has rows of {shape[-1]} values, and {TYPES[kind].name} comes in "
                              f"{TYPES[kind].values}")  # fmt: skip
        return name, shape, TYPES[kind], offset

    def data(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, [rows, bytes of a row], a view of the mapped file."""
        flat = np.frombuffer(self._map, np.uint8, info.bytes, info.start)
        return flat.reshape(-1, info.type.bytes_of(info.shape[-1:]))

    @property
    def address(self) -> int:
        """Where the file's first byte is mapped."""
        return int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)

    @property
    def bytes(self) -> int:
        return len(self._map)

    def let_go(self, start: int, end: int) -> None:
        """Gives back the memory of bytes `start` to `end` of the file; they are read again if they must be.

        What lies in the same `AROUND` bytes goes too: the kernel maps that much around each page that is read.
        """
        start, end = start // AROUND * AROUND, min(-(-end // AROUND) * AROUND, len(self._map))
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def _mapped(path: Path) -> mmap.mmap:
    """The file's bytes. Whoever writes to them changes a copy: torch takes no memory that may not be written."""
    try:
        with path.open("rb") as file:
            if sys.platform == "linux":
                flags = mmap.MAP_PRIVATE | NORESERVE
                return mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:  # nothing can be mapped of an empty file
        raise BrokenFile(f"{path} is empty. Download or export it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error


class Metadata:
    """Lookups in a file's metadata that say what is missing or wrong."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def whole(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number from 1 to `most`; of an array that has one value throughout (one for each layer), that."""
        value = self.values.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()
        if type(value) is not int or not 0 < value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None, above: float | None = None) -> float:
        """A finite number, larger than `above`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise self.wrong(key, "a number")
        if above is not None and value <= above:
            raise self.wrong(key, f"a number above {above:g}")
        return float(value)

    def index(self, key: str, size: int) -> int | None:
        """A number of `size` things counted from 0, or None where the key is missing."""
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < size):
            raise self.wrong(key, f"a number from 0 to {size - 1:,}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts; bytes that are not UTF-8 become U+FFFD."""
        value = self.values.get(key)
        if not isinstance(value, TextArray):
            raise self.wrong(key, "a list of texts")
        return [each.decode("utf-8", "replace") for each in value]

    def array(self, key: str, *, whole: bool = False) -> list[Any]:
        """A list of numbers, or of whole ones; empty where the key is missing."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.dtype.kind not in ("iu" if whole else "iuf"):
            raise self.wrong(key, f"a list of {'whole ' if whole else ''}numbers")
        return list(value.tolist())

    def wrong(self, key: str, wanted: str) -> UserError:
        if key in self.values:
            value = repr(self.values[key])
            return UserError(f"{self.path}: the metadata's {key} must be {wanted}, got {value[:60]}.")
        return UserError(f"{self.path}: the metadata has no {key}, which must be {wanted}. Export it again.")
