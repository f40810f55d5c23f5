"""store.int8: off by half a scale at most, half the bytes or less, and a format like any other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.engine.engine import Engine
from phasewise.kv.format import KVShape, Raw, entry_bytes
from phasewise.methods.store.int8 import Int8
from phasewise.ops import native
from tests import oracle, tiny
from tests.kv.harness import Walk, cuts

CODEC = Int8().format()
DECODE = type(CODEC).decode


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.floats(-30, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_number_is_off_by_more_than_half_a_scale(seed: int, magnitude: float, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 5, 16, generator=gen).mul(10.0**magnitude).to(dtype) for _ in range(2))
    k[0, 0] = 0
    v[1, 2, 3:] = 0
    planes = CODEC.encode(k, v)
    for x, y, levels, scale in zip((k, v), CODEC.decode(planes, torch.float32), planes[::2], planes[1::2]):
        assert levels.dtype == torch.int8 and levels.shape == x.shape and scale.shape == x.shape[:2]
        error = (y - x.float()).abs()
        assert bool((error <= scale.float()[..., None] * (0.5 + 1e-5)).all())
        assert bool((scale.float() <= x.float().abs().amax(-1) / 127 * 1.005 + 1e-29).all()), "no coarser than need be"
    assert not CODEC.decode(planes, torch.float32)[0][0, 0].any(), "nothing stays nothing"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_rows_form_depends_on_that_row_alone(seed: int, sizes: list[int]) -> None:
    n = sum(sizes)
    k, v = torch.randn(2, 2, n, 8, generator=torch.Generator().manual_seed(seed))
    whole = CODEC.encode(k, v)
    pieces = [CODEC.encode(a, b) for a, b in zip(k.split(sizes, 1), v.split(sizes, 1))]
    for plane, parts in zip(whole, zip(*pieces)):
        assert torch.equal(plane, torch.cat(parts, 1))


def test_bytes() -> None:
    for dtype, dim in ((torch.float32, 12), (torch.bfloat16, 64)):
        shape = KVShape(2, dim, dtype)
        assert entry_bytes(CODEC, shape) == 2 * (dim + 2)
        assert entry_bytes(Raw(), shape) == 2 * dim * dtype.itemsize
    plain, small = (tiny.engine(v, prefix_cache=False) for v in ({}, {"store": "int8"}))
    tiny.run(plain, tiny.prompts(50))
    tiny.run(small, tiny.prompts(50))
    for counter in ("kv_bytes_written", "kv_bytes_read"):
        assert getattr(small.counters, counter) * 48 == getattr(plain.counters, counter) * 14


def test_the_tag_says_what_the_rows_are() -> None:
    """Law 10: quantised rows say so, wherever they go, and never meet exact ones."""
    engine = tiny.engine({"store": "int8"})
    assert isinstance(engine, Engine)
    assert engine.store.format.exactness == "quantised" and Int8(bits=16).format().exactness == "true"
    request = tiny.Request(tiny.prompts(70)[0], tiny.greedy(4))
    engine.add(request)
    while request.prefilling:
        engine.step()
    assert request.kv is not None
    assert all(layer.format.exactness == "quantised" for layer in request.kv.layers)
    assert {plane.dtype for piece in request.kv.dump() for plane in piece["planes"]} == {torch.int8, torch.bfloat16}
    plain = tiny.engine()
    assert isinstance(plain, Engine) and plain.store.tree is not None and engine.store.tree is not None
    assert plain.store.tree.root.key != engine.store.tree.root.key


def test_sixteen_bits_are_as_is() -> None:
    prompts = tiny.prompts(41, 70)
    got = tiny.outs(tiny.run(tiny.engine({"store": "int8:bits=16"}), prompts))
    assert got == [oracle.greedy(tiny.checkpoint(), prompt, 16)[0] for prompt in prompts]


def test_logits_stay_near() -> None:
    """Eight bits move the logits a little, and not at all in the first token's attention to itself alone."""
    tokens = tiny.prompts(100)[0]
    one = Walk(tiny.model(), tokens, format=CODEC)
    got, want = one.feed(tokens), oracle.logits(tiny.checkpoint(), tokens)
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert 1e-5 < float(error.mean()) < 0.1
    assert float((got.argmax(-1) == want.argmax(-1)).float().mean()) > 0.9


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_prompts_are_read_without_decoding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the open path, too, and bit for bit what decoding them first gives."""
    tokens, calls = tiny.prompts(100)[0], []
    monkeypatch.setattr(type(CODEC), "decode", lambda *args: calls.append(0) or DECODE(*args))
    got = [Walk(tiny.model(), tokens, format=CODEC).feed(tokens)]
    assert not calls
    monkeypatch.setattr(type(CODEC), "scaled", False)
    got.append(Walk(tiny.model(), tokens, format=CODEC).feed(tokens))
    assert calls and torch.equal(*got)


def test_chunks_change_next_to_nothing() -> None:
    """A number at the edge of a level may fall to the other side, no more: a row reads itself in 8 bits, too."""
    tokens = tiny.prompts(150)[0]
    whole = Walk(tiny.model(), tokens, format=CODEC)
    logits, planes = whole.feed(tokens), whole.kv.dump()[0]["planes"]
    for sizes in ([1], [3], [7], [64, 5]):
        one = Walk(tiny.model(), tokens, format=CODEC)
        got = torch.cat([one.feed(piece) for piece in cuts(tokens, sizes)])
        moved = (got - logits).abs()
        assert float(moved.max()) < 0.2 and float(moved.median()) < 0.01  # of logits that spread by 6
        for a, b in zip(planes[::2], one.kv.dump()[0]["planes"][::2]):
            assert int((a.int() - b.int()).abs().max()) <= 1 and float((a != b).float().mean()) < 1e-3


def test_forks_hand_offs_and_evictions_carry_the_planes_as_they_are() -> None:
    """Nothing is ever quantised twice: what was written once is moved bit for bit."""
    tokens = tiny.prompts(90)[0]
    one = Walk(tiny.model(), tokens[:60], format=CODEC)
    one.feed(tokens[:60])
    first = one.kv.dump()
    twin = one.fork()
    for piece in cuts(tokens[60:], [1, 9]):
        assert torch.equal(one.feed(piece), twin.feed(piece))
    index = torch.arange(0, 90, 2)
    one.kv.keep(0, index)
    for plane, before, after in zip(first[0]["planes"], twin.kv.dump()[0]["planes"], one.kv.dump()[0]["planes"]):
        assert torch.equal(before[:, :60], plane)
        assert torch.equal(after, before[:, index])
    dumped = twin.kv.dump()
    other = Walk(tiny.model(), tokens, format=CODEC)
    other.kv.load(dumped)
    for a, b in zip(dumped, other.kv.dump()):
        assert all(torch.equal(x, y) for x, y in zip(a["planes"], b["planes"]))
    one.kv.close()
    twin.kv.close()
    assert one.ledger.used == 0, "one ledger for both"
