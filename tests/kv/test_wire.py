"""Rows on their way, as dumps: nothing further off than promised, nothing damaged unnoticed, fewer bytes per level."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.kv.format import KVShape
from phasewise.kv.handoff import _decode, _encode
from phasewise.kv.wire import Dump, Encoded, Misfit, RowsOrigin, bits_of, from_bits, opened, sealed
from phasewise.methods.store._cachegen.chunked import Chunked, ChunkPlan
from phasewise.methods.store._cachegen.rounding import LEVELS

LAYERS, HEADS, DIM = 6, 2, 16


def shapes(dtype: torch.dtype = torch.float32) -> list[KVShape]:
    return [KVShape(HEADS, DIM, dtype)] * LAYERS


def wire(level: int | None = 2, chunk: int = 16, group: int = 1, dtype: torch.dtype = torch.float32) -> Chunked:
    return Chunked(ChunkPlan(level, chunk, group, 1.0), shapes(dtype), bandwidth=1e6)


def dump(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Dump:
    """Rows whose channels are of different size, as in a model."""
    gen = torch.Generator().manual_seed(seed)
    spread = torch.rand(LAYERS, 2, HEADS, 1, DIM, generator=gen) ** 2 + 0.02
    numbers = (torch.randn(LAYERS, 2, HEADS, rows, DIM, generator=gen) * spread).to(dtype)
    return [
        {"heads": None, "positions": None, "planes": [k.clone(), v.clone()], "last": True} for k, v in numbers.unbind()
    ]


def ragged(rows: int) -> Dump:
    """As after an eviction of each head by itself: slabs of one head, positions with gaps; one layer is freed."""
    out: Dump = []
    for layer, piece in enumerate(dump(rows)):
        if layer == 3:
            out.append({"heads": None, "positions": None, "planes": [], "last": True})
        elif layer % 2:
            piece["positions"] = torch.arange(rows)[None].repeat(HEADS, 1) * 3
            out.append(piece)
        else:
            for head in range(HEADS):
                n = max(1, rows - 7 * head)
                planes = [plane[head : head + 1, :n].clone() for plane in piece["planes"]]
                out.append({"heads": torch.tensor([head]), "positions": torch.arange(n)[None] * 2, "planes": planes})
            out[-1]["last"] = True
    return out


def carry(encoded: Encoded) -> Any:
    """To the other side: headers as JSON, tensors by themselves."""
    tensors: list[torch.Tensor] = []
    return _decode(json.loads(json.dumps(_encode(encoded.content, tensors))), tensors)


def n_bytes(encoded: Encoded) -> int:
    return sum(chunk.numel() for chunk in encoded.content["chunks"])


def same(a: Dump, b: Dump) -> None:
    for x, y in zip(a, b, strict=True):
        assert bool(x.get("last")) == bool(y.get("last"))
        for key in ("heads", "positions"):
            assert (x[key] is None) == (y[key] is None) and (x[key] is None or torch.equal(x[key], y[key]))
        assert len(x["planes"]) == len(y["planes"])
        for p, q in zip(x["planes"], y["planes"]):
            assert p.dtype == q.dtype and torch.equal(p.nan_to_num(7.0), q.nan_to_num(7.0))


def steps(dumped: Dump, level: int) -> list[tuple[torch.Tensor, int]]:
    """Every plane with the steps of its layer."""
    found, layer = [], 0
    for piece in dumped:
        found += list(zip(piece["planes"], LEVELS[level - 1].steps(layer, LAYERS)))
        layer += bool(piece.get("last"))
    return found


@settings(max_examples=5, deadline=None)
@given(
    st.integers(1, 70), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 16, 64]), st.sampled_from([1, 10]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(),
)  # fmt: skip
def test_what_arrives(
    rows: int, level: int, chunk: int, group: int, dtype: torch.dtype, evicted: bool
) -> None:  # fmt: skip
    """No further off than half a step of the row's largest number (and the dtype's own rounding), and just what an
    engine that keeps the rows would make of them."""
    given_ = ragged(rows) if evicted else dump(rows, dtype)
    one = wire(level, chunk, group, torch.float32 if evicted else dtype)
    encoded = one.encode(given_, RowsOrigin())
    assert encoded.lossy and encoded.rows is None
    arrived = wire(level, chunk, group, one.shapes[0].dtype).decode(carry(encoded))
    for (x, most), (y, _) in zip(steps(given_, level), steps(arrived, level), strict=True):
        x, y = x.float(), y.float()
        largest = x.abs().amax((0, 2), keepdim=True)  # of a row, all heads together
        if group > 1:
            largest = 2 * x.abs().max()  # of a difference, at most
        assert bool(((x - y).abs() <= largest * (0.5 / most + 0.006) + 1e-6).all())
    same(arrived, one.settled([{**piece, "planes": [p.clone() for p in piece["planes"]]} for piece in given_]))


def test_nothing_to_send() -> None:
    for given_ in (dump(0), [{"heads": None, "positions": None, "planes": [], "last": True}] * LAYERS):
        encoded = wire().encode(given_, RowsOrigin())
        assert encoded.content["chunks"] == []
        same(wire().decode(carry(encoded)), given_)


def test_coarser_levels_take_fewer_bytes_and_are_further_off() -> None:
    given_ = dump(256, torch.bfloat16)
    raw = len(bits_of(plane for piece in given_ for plane in piece["planes"]))
    sizes, errors = [], []
    for level in range(1, len(LEVELS) + 1):
        one = wire(level, 256, dtype=torch.bfloat16)
        encoded = one.encode(given_, RowsOrigin())
        pairs = zip(steps(given_, 1), steps(one.decode(carry(encoded)), 1))
        sizes.append(n_bytes(encoded))
        errors.append(sum(float((x.float() - y.float()).square().sum()) for (x, _), (y, _) in pairs))
    int8 = raw / 2 * (DIM + 2) / DIM
    assert raw > int8 > sizes[0], "level 1 has as many steps as store int8 in fewer bytes"
    assert all(a > b * 1.05 for a, b in pairwise(sizes)) and all(a < b for a, b in pairwise(errors))
    assert raw / sizes[1] > 3 and raw / sizes[3] > 4.5


def test_level_0_is_bit_exact_and_so_is_what_cannot_be_rounded() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        one = wire(None, 16, dtype=dtype)  # fast enough for the best level
        encoded = one.encode(dump(40, dtype), RowsOrigin())
        assert not encoded.lossy and encoded.content["levels"] == [0, 0, 0]
        same(wire(None, 16, dtype=dtype).decode(carry(encoded)), dump(40, dtype))
    given_ = dump(40)
    given_[2]["planes"][1][1, 20, 3] = float("nan")
    given_[4]["planes"][0][0, 39, 0] = float("inf")
    encoded = wire(4).encode(given_, RowsOrigin())
    assert encoded.content["levels"] == [4, 0, 0] and encoded.lossy
    arrived = wire(4).decode(carry(encoded))
    for piece in (*given_, *arrived):
        piece["planes"] = [plane[:, 16:] for plane in piece["planes"]]
    same(arrived, given_)


def test_chunks_do_not_know_of_each_other() -> None:
    """Rows of a chunk arrive as they would if they were alone: levels may change from chunk to chunk."""
    whole = wire(3).decode(carry(wire(3).encode(dump(40), RowsOrigin())))
    part = [{**piece, "planes": [plane[:, 16:32] for plane in piece["planes"]]} for piece in dump(40)]
    alone = wire(3).decode(carry(wire(3).encode(part, RowsOrigin())))
    for a, b in zip(whole, alone):
        assert all(torch.equal(p[:, 16:32], q) for p, q in zip(a["planes"], b["planes"]))


# ---- damage
def content(level: int | None = 3) -> dict[str, Any]:
    found: dict[str, Any] = carry(wire(level).encode(ragged(40), RowsOrigin()))
    return found


def refused(damaged: dict[str, Any], words: str | None = None) -> None:
    with pytest.raises(Misfit, match=words):
        wire(3).decode(damaged)


def test_damaged_bytes_are_refused() -> None:
    whole = content()
    for at in (0, 15, 16, 20, 100, -1):
        chunks = [chunk.clone() for chunk in whole["chunks"]]
        chunks[1][at] ^= 64
        refused(whole | {"chunks": chunks}, "checksum")
    for end in (0, 3, 16, 200, -1):
        refused(whole | {"chunks": [whole["chunks"][0][:end], *whole["chunks"][1:]]}, "checksum")
    refused(whole | {"chunks": whole["chunks"][::-1]}, "checksum")
    refused(whole | {"chunks": whole["chunks"][:-1]}, "2 chunks instead of 3")
    refused(whole | {"chunks": [None, *whole["chunks"][1:]]}, "bytes are wanted")
    refused(whole | {"chunks": [whole["chunks"][0].float(), *whole["chunks"][1:]]}, "bytes are wanted")


def test_damaged_headers_are_refused() -> None:
    whole, pieces = content(), content()["pieces"]
    refused(whole | {"levels": [3, 3, 2]}, "checksum")
    refused(whole | {"levels": [3, 3]})
    refused(whole | {"levels": [3, 3, 99]}, "checksum")
    refused({"levels": [], "chunks": []}, "KeyError")
    refused(whole | {"pieces": pieces[:-1]})
    refused(whole | {"pieces": [pieces[0] | {"shape": [2, 40, 16]}, *pieces[1:]]}, "checksum")
    moved = pieces[0]["positions"] + 1
    refused(whole | {"pieces": [pieces[0] | {"positions": moved}, *pieces[1:]]}, "checksum")
    refused(whole | {"pieces": [pieces[0] | {"heads": torch.tensor([1])}, *pieces[1:]]}, "checksum")
    refused(whole | {"pieces": "nonsense"})


def test_rows_of_another_model_are_refused() -> None:
    whole = carry(wire(3).encode(dump(20), RowsOrigin()))
    for other in ([KVShape(HEADS, 8, torch.float32)] * LAYERS, [KVShape(1, DIM, torch.float32)] * LAYERS,
                  shapes()[:3]):  # fmt: skip
        with pytest.raises(Misfit):
            Chunked(ChunkPlan(3, 16, 1, 1.0), other).decode(whole)


def test_seals() -> None:
    message = sealed(b"rows", "about")
    assert opened(message, "about") == b"rows" and opened(sealed(b"", "x"), "x") == b""
    for wrong, about in ((message, "other"), (message[:-1], "about"), (message[:5], "about"), (message[:0], "about")):
        with pytest.raises(Misfit, match="checksum"):
            opened(wrong, about)


def test_bits() -> None:
    tensors = [torch.randn(2, 3).to(torch.bfloat16), torch.empty(0, 4, dtype=torch.bfloat16), torch.ones(1).bfloat16()]
    data = bits_of(tensors)
    assert len(data) == 14
    for x, y in zip(tensors, from_bits(data, [t.shape for t in tensors], torch.bfloat16), strict=True):
        assert torch.equal(x, y)
    assert from_bits(b"", [(0, 3)], torch.float32)[0].shape == (0, 3)
    with pytest.raises(ValueError, match="13 bytes are not 7 numbers"):
        from_bits(data[:-1], [t.shape for t in tensors], torch.bfloat16)


# ---- the level is chosen
def paced(bandwidth: float, deadline: float, row: float | None = None) -> Chunked:
    one = Chunked(ChunkPlan(None, 16, 1, deadline), shapes(), bandwidth)
    if row is not None:
        one.pace.computed(1, row)
    return one


def test_levels_follow_the_bandwidth() -> None:
    """40 rows are 61,440 bytes as they are; slower links get coarser levels, the slowest nothing, if it may be so."""
    stop, seen = RowsOrigin(may_stop=True), []
    for bandwidth in (1e9, 20_000.0, 15_000.0, 10_000.0, 100.0):
        encoded = paced(bandwidth, 1.0, row=0.01).encode(dump(40), stop)
        seen.append(sum(encoded.content["levels"]) / max(1, len(encoded.content["levels"])))
        if bandwidth == 100.0:
            assert encoded.rows == 0 and encoded.content["chunks"] == [] and not encoded.lossy
        else:
            assert encoded.rows is None
            assert n_bytes(encoded) <= bandwidth or bandwidth == 10_000.0
    assert seen[0] == 0 and seen[0] < seen[1] < seen[2] < seen[3]
    slow = paced(100.0, 1.0, row=0.01).encode(dump(40), RowsOrigin(may_stop=False))
    assert slow.content["levels"] == [4, 4, 4], "late, but there"
    unknown = paced(100.0, 1.0).encode(dump(40), stop)
    assert unknown.content["levels"] == [4, 4, 4], "how long computing takes is not known"


def test_a_suffix_left_out() -> None:
    one = paced(1e9, 1.0)
    one.pace.plan = lambda rows, numbers, seconds, may_stop: [1, 0, None]  # type: ignore[method-assign]
    encoded = one.encode(dump(40), RowsOrigin(may_stop=True))
    assert encoded.rows == 32 and encoded.lossy and encoded.content["levels"] == [1, 0]
    arrived = paced(1e9, 1.0).decode(carry(encoded))
    for a, b in zip(arrived, dump(40)):
        assert all(p.shape[1] == 32 and torch.equal(p[:, 16:], q[:, 16:32]) for p, q in zip(a["planes"], b["planes"]))


def test_moves_teach_the_sender() -> None:
    one = Chunked(ChunkPlan(None, 16, 1, 1.0), shapes())
    first = one.encode(dump(40), RowsOrigin(rows=40, seconds=0.4))
    assert first.content["levels"] == [2, 2, 2], "nothing is known of the link yet"
    assert one.pace.size(2) < 0.8 and one.pace.size(1) == one.pace.guesses[1]
    one.delivered(1000, 1.0)
    assert one.encode(dump(40), RowsOrigin(may_stop=True)).rows == 0, "0.4 s to compute instead of many to send"
    for _ in range(20):
        one.delivered(10**7, 0.01)
    assert one.encode(dump(40), RowsOrigin()).content["levels"] == [0, 0, 0]
