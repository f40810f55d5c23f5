"""The file of one prefix block: a header of fixed size, then every version of the block, each under a digest.

    magic 8 | space 16 | key 16 | versions u32 | VERSIONS x (bytes u64, digest 16) | digest of the header 16 | bodies

`space` names what the rows mean (model, store, methods, form, layout), `key` the tokens (kv/prefix.py: `chain`). Every
digest is keyed with both, so a file that was renamed, moved from another model's folder, cut or changed is refused.
All numbers are little-endian. Nothing in a file is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.kv.wire import Misfit

MAGIC = b"PWBLOCK1"
VERSIONS = 8  # most versions of a block
DIGEST = 16  # bytes
_FIXED = struct.Struct("<8s16s16sI")
_VERSION = struct.Struct(f"<Q{DIGEST}s")
HEADER = _FIXED.size + VERSIONS * _VERSION.size + DIGEST  # bytes


@dataclass(frozen=True, slots=True)
class BlockName:
    """The name of a block on disk: 16 bytes of its space and 16 of its key."""

    space: bytes
    key: bytes

    def digest(self, body: bytes | bytearray | memoryview) -> bytes:
        return hashlib.blake2b(body, digest_size=DIGEST, key=self.space + self.key).digest()


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The sizes and digests of a block's versions."""

    sizes: tuple[int, ...]
    digests: tuple[bytes, ...]

    def span(self, version: int) -> tuple[int, int]:
        """Where a version begins in the file, and its bytes."""
        return HEADER + sum(self.sizes[:version]), self.sizes[version]

    def body(self, name: BlockName, version: int, body: bytearray) -> bytearray:
        """The body, once it is known to be what was written. Raises Misfit."""
        if name.digest(body) != self.digests[version]:
            raise Misfit(f"the digest of {len(body)} bytes is wrong")
        return body


def packed(name: BlockName, bodies: Sequence[bytes]) -> list[bytes]:
    """The parts of a file, to be written one after another."""
    assert 0 < len(bodies) <= VERSIONS
    head = bytearray(_FIXED.pack(MAGIC, name.space, name.key, len(bodies)))
    for at in range(VERSIONS):
        body = bodies[at] if at < len(bodies) else None
        head += _VERSION.pack(0, bytes(DIGEST)) if body is None else _VERSION.pack(len(body), name.digest(body))
    return [bytes(head) + name.digest(head), *bodies]


def unpacked(name: BlockName, head: bytes, size: int) -> BlockHeader:
    """The header of a file of `size` bytes that should hold the block of this name. Raises Misfit."""
    if len(head) != HEADER:
        raise Misfit(f"{len(head)} bytes are no header")
    magic, space, key, count = _FIXED.unpack_from(head)
    if magic != MAGIC or (space, key) != (name.space, name.key):
        raise Misfit("it is the file of something else")
    if head[-DIGEST:] != name.digest(head[:-DIGEST]) or not 0 < count <= VERSIONS:
        raise Misfit("the digest of its header is wrong")
    each = [_VERSION.unpack_from(head, _FIXED.size + at * _VERSION.size) for at in range(count)]
    found = BlockHeader(tuple(n for n, _ in each), tuple(digest for _, digest in each))
    if HEADER + sum(found.sizes) != size:
        raise Misfit(f"it has {size} bytes instead of {HEADER + sum(found.sizes)}")
    return found
