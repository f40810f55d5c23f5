"""Symbols to bytes and back: the same symbols, about their entropy in bits, and no message taken for another's."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.llm import LLM
from phasewise.methods.store._cachegen.entropy import HEAD, Symbols, decode, encode, entropy, histogram, sharing
from phasewise.request.params import Params
from phasewise.request.request import Request

Streams = list[tuple[Symbols, int]]


def shapes(streams: Streams) -> list[tuple[int, int, int]]:
    return [(*symbols.shape, alphabet) for symbols, alphabet in streams]  # type: ignore[misc]


def trip(streams: Streams) -> bytes:
    data = encode(streams)
    for (symbols, _), arrived in zip(streams, decode(data, shapes(streams)), strict=True):
        assert arrived.dtype == np.uint8 and np.array_equal(symbols, arrived)
    return data


def channels(count: int, length: int, alphabet: int, seed: int = 0) -> Symbols:
    """Channels with bell curves of their own."""
    rng = np.random.default_rng(seed)
    centre, width = rng.uniform(0.3, 0.7, (count, 1)) * alphabet, rng.uniform(0.02, 0.2, (count, 1)) * alphabet
    return np.clip(np.rint(rng.normal(centre, width, (count, length))), 0, alphabet - 1).astype(np.uint8)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_symbols_come_back(data: st.DataObject) -> None:
    streams = []
    for _ in range(data.draw(st.integers(0, 4))):
        count, length = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 40))
        alphabet = data.draw(st.sampled_from([2, 11, 15, 31, 255, 256]))
        rng = np.random.default_rng(data.draw(st.integers(0, 999)))
        top = data.draw(st.integers(1, alphabet))
        streams.append((rng.integers(0, top, (count, length)).astype(np.uint8), alphabet))
    trip(streams)


def test_degenerate_distributions() -> None:
    one = np.full((8, 300), 7, np.uint8)
    assert len(trip([(one, 15)])) < 40, "a constant takes next to nothing"
    rare = one.copy()
    rare[3, 5] = 14
    trip([(rare, 15)])
    trip([(np.array([[3]], np.uint8), 15)])  # one token, one channel
    trip([(np.arange(64, dtype=np.uint8).reshape(64, 1), 255)])  # one token
    trip([])
    trip([(np.empty((0, 5), np.uint8), 15), (np.empty((5, 0), np.uint8), 15), (one, 15)])


@pytest.mark.parametrize(("length", "alphabet", "over"), [(256, 15, 0.01), (256, 31, 0.01), (1000, 255, 0.02)])
def test_the_size_is_about_the_entropy(length: int, alphabet: int, over: float) -> None:
    """Beside the tables, 2 % at most: what rounding the histograms costs."""
    symbols = channels(128, length, alphabet)
    data, counts = trip([(symbols, alphabet)]), histogram(symbols, alphabet)
    words = HEAD.unpack_from(data)[1] * 8
    share = sharing(counts)
    ideal = entropy(counts.reshape(128 // share, share, -1).sum(1))
    assert ideal * (1 - 1e-6) <= words + 32 and words <= ideal * (1 + over) + 64


def test_entropy_of_counts() -> None:
    assert entropy(np.array([[4, 4], [8, 0]])) == 8.0
    assert entropy(np.array([[1, 1, 2]])) == pytest.approx(6.0)
    assert entropy(np.zeros((2, 3), np.int64)) == 0.0


def test_tables_are_shared_where_symbols_are_few() -> None:
    counts = {length: histogram(channels(64, length, 31), 31) for length in (1, 4, 2000)}
    assert sharing(counts[2000]) == 1
    assert sharing(counts[1]) >= sharing(counts[4]) > 1
    alike = np.repeat(channels(1, 2000, 31), 6, 0)
    assert sharing(histogram(alike, 31)) == 6, "channels that are alike need one table"


def test_channels_of_a_real_model_are_worth_tables_of_their_own() -> None:
    """The paper's third insight, on the pocket model's keys and values: one histogram for all costs 5 % more."""
    from phasewise.methods.store._cachegen.rounding import shrink

    llm = LLM()
    request = Request(llm.encode("def chunks(items, size):\n    " * 40)[:400], Params(max_tokens=2, ignore_eos=True))
    llm.engine.add(request)
    while request.prefilling:
        llm.engine.step()
    assert request.kv is not None
    each = whole = 0.0
    for piece in request.kv.dump():
        for plane in piece["planes"]:
            symbols = shrink(plane.float().permute(1, 0, 2).flatten(1), 15).symbols.T.contiguous().numpy()
            counts = histogram(symbols, 31)
            each, whole = each + entropy(counts), whole + entropy(counts.sum(0, keepdims=True))
    assert each * 1.05 < whole
    llm.engine.cancel(request)


def test_other_bytes_are_refused() -> None:
    streams: Streams = [(channels(8, 50, 15), 15), (channels(8, 50, 31, seed=1), 31)]
    data, known = encode(streams), shapes([(channels(8, 50, 15), 15), (channels(8, 50, 31, seed=1), 31)])
    for end in (*range(0, len(data), 7), len(data) - 1):
        with pytest.raises(ValueError):
            decode(data[:end], known)
    with pytest.raises(ValueError):
        decode(data + b"\0", known)
    for wrong in (known[:1], known[::-1], [(8, 50, 15), (16, 50, 31)], [(7, 50, 15), (8, 50, 31)], [*known, known[0]]):
        with pytest.raises(ValueError):
            decode(data, wrong)


def test_damage_raises_nothing_but_a_value_error() -> None:
    streams: Streams = [(channels(8, 50, 15), 15)]
    data, rng = encode(streams), np.random.default_rng(0)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        with suppress(ValueError):  # what looks like a message still is the checksum's business
            decode(bytes(damaged), shapes(streams))
