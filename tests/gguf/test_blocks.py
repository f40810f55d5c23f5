"""Block formats give, bit for bit, what the format's own package expands them to."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phasewise.gguf.blocks import TYPES, BlockType

KINDS = {kind.name: (gguf.GGMLQuantizationType(i), kind) for i, kind in TYPES.items()}
NAMES = sorted(KINDS)
# what the package can make of numbers; the K types it only reads
MADE = ["BF16", "F16", "F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def ours(kind: BlockType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return kind.expand(raw.reshape(-1, kind.size))


def theirs(which: gguf.GGMLQuantizationType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, which)).astype(np.float32, copy=False)


def same(a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    """Equal bits, and numbers that are none in the same places."""
    assert a.dtype == b.dtype == np.float32 and a.size == b.size
    a, b = a.reshape(-1), b.reshape(-1)
    none = np.isnan(a)
    assert np.array_equal(none, np.isnan(b))
    assert np.array_equal(a[~none].view(np.uint32), b[~none].view(np.uint32))


def test_every_type_is_the_packages() -> None:
    for name, (which, kind) in KINDS.items():
        assert which.name == name
        assert gguf.GGML_QUANT_SIZES[which] == (kind.values, kind.size)
        assert kind.bytes_of((3, 2 * kind.values)) == 6 * kind.size


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes(name: str) -> None:
    which, kind = KINDS[name]
    raw = np.random.default_rng(0).integers(0, 256, 700 * kind.size, dtype=np.uint8)
    values = ours(kind, raw)
    assert values.shape == (700, kind.values)
    same(values, theirs(which, raw))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_any_bytes(name: str, data: st.DataObject) -> None:
    """Blocks of few different bytes: scales that are zero, infinite or no numbers, and every bit set or clear."""
    which, kind = KINDS[name]
    few = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=4))
    blocks = data.draw(st.integers(1, 3))
    raw = np.array(data.draw(st.lists(st.sampled_from(few), min_size=blocks * kind.size, max_size=blocks * kind.size)),
                   dtype=np.uint8)  # fmt: skip
    same(ours(kind, raw), theirs(which, raw))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_may_not_be_written(name: str) -> None:
    """A mapped file's, and at any address."""
    which, kind = KINDS[name]
    raw = np.random.default_rng(1).integers(0, 256, 5 * kind.size + 1, dtype=np.uint8)[1:]
    raw.flags.writeable = False
    same(ours(kind, raw), theirs(which, raw))


@pytest.mark.parametrize("name", MADE)
def test_numbers_there_and_back(name: str) -> None:
    which, kind = KINDS[name]
    values = np.random.default_rng(2).standard_normal((40, 4 * max(32, kind.values)), dtype=np.float32)
    raw = gguf.quants.quantize(values, which)
    assert raw.nbytes == kind.bytes_of(values.shape)
    found = ours(kind, np.ascontiguousarray(raw).view(np.uint8).reshape(-1)).reshape(values.shape)
    same(found, theirs(which, raw.view(np.uint8)))
    worst = {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 0.03}.get(name, 0.6)
    assert np.abs(found - values).max() <= worst
