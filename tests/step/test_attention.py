"""Attention kernels against their plain twin, and the plain twin against a loop anyone can check."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.ops import attention as ops
from tests import double

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 10**6))


def make(rows: int, heads: int, group: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads * group, 8, generator=gen)
    return q, torch.randn(heads, n, 8, generator=gen), torch.randn(heads, n, 8, generator=gen)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
            softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One query head and one row at a time, in Python floats."""
    rows, heads_q, _ = q.shape
    group = heads_q // k.shape[0]
    out, lse = torch.zeros_like(q), torch.full((rows, heads_q), float("-inf"))
    for r in range(rows):
        for head in range(heads_q):
            h = head // group
            logits = {}
            for j in range(k.shape[1]):
                if mask is None or bool(mask[h % mask.shape[0], r, j]):
                    x = scale * float(q[r, head].double() @ k[h, j].double())
                    logits[j] = x if softcap is None else softcap * math.tanh(x / softcap)
            if logits:
                top = max(logits.values())
                total = sum(math.exp(x - top) for x in logits.values())
                lse[r, head] = top + math.log(total)
                out[r, head] = sum(math.exp(x - top) / total * v[h, j] for j, x in logits.items())
    return out, lse


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from([None, 2.0]), st.sampled_from(["none", "shared", "per head"]))
def test_reference_is_attention(shape: tuple[int, ...], softcap: float | None, masked: str) -> None:
    q, k, v = make(*shape)
    rows, heads, _, n, seed = shape
    mask = None
    if masked != "none":  # rows that see nothing included
        gen = torch.Generator().manual_seed(seed + 1)
        mask = torch.rand(1 if masked == "shared" else heads, rows, n, generator=gen) < 0.5
    out, lse = ops.reference(q, k, v, mask, 0.3, softcap)
    want, want_lse = by_hand(q, k, v, mask, 0.3, softcap)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([None, 2.0]), st.sampled_from(["none", "shared", "per head"]))
def test_attention_equals_reference(shape: tuple[int, ...], softcap: float | None, masked: str) -> None:
    q, k, v = make(*shape)
    rows, heads, _, n, seed = shape
    mask = None
    if masked != "none":
        gen = torch.Generator().manual_seed(seed + 1)
        mask = torch.rand(1 if masked == "shared" else heads, rows, n, generator=gen) < 0.5
        mask[:, :, seed % n] = True
    want = ops.reference(q, k, v, mask, 0.3, softcap)[0]
    torch.testing.assert_close(ops.attention(q, k, v, mask, 0.3, softcap), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "n"), [(2, 2), (5, 64), (64, 64), (65, 65), (70, 200), (130, 130)])
def test_causal_equals_reference(rows: int, n: int) -> None:
    q, k, v = make(rows, 2, 2, n, 3)
    mask = torch.ones(rows, n, dtype=torch.bool).tril(n - rows)[None]
    torch.testing.assert_close(ops.causal(q, k, v, 0.3), ops.reference(q, k, v, mask, 0.3)[0], atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.lists(st.integers(0, 2), min_size=40, max_size=40))
def test_merge_joins_disjoint_parts(shape: tuple[int, ...], owner: list[int]) -> None:
    """However rows are dealt out, attention over the parts merges to attention over all; empty parts say nothing."""
    q, k, v = make(*shape)
    mine = torch.tensor(owner[: shape[3]])
    masks = [(mine == part).expand(1, shape[0], -1) for part in range(3)]
    whole = ops.reference(q, k, v, None, 0.3)[0]
    merged = ops.merge([ops.reference(q, k, v, mask, 0.3) for mask in masks])
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-4)
    sliced = ops.merge([ops.reference(q, k[:, mine == part], v[:, mine == part], None, 0.3) for part in range(3)])
    torch.testing.assert_close(sliced, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("own", [0, 1, 7])
@pytest.mark.parametrize("levels", [(11,), (11, 4), (11, 4, 23)], ids=len)
def test_beginnings_and_an_end_that_may_be_empty_merge_exactly_in_double(
    monkeypatch: pytest.MonkeyPatch, levels: tuple[int, ...], own: int
) -> None:
    """One, two or three levels in common and rows of one's own, none of them (log-sum-exp: -inf), to 1e-12."""
    double.everything(monkeypatch)
    q, k, v = (each.double() for each in make(3, 2, 3, sum(levels) + own, 5))
    sizes = [*levels, own]
    pieces = [ops.unmasked(q, *each, 0.3) for each in zip(k.split(sizes, 1)[:-1], v.split(sizes, 1)[:-1])]
    last = ops.reference(q, k[:, sum(levels) :], v[:, sum(levels) :], None, 0.3)
    assert bool((last[1] == float("-inf")).all()) is (own == 0)
    got, want = ops.merge([*pieces, last]), ops.reference(q, k, v, None, 0.3)[0]
    assert got.dtype == want.dtype == torch.float64
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_low_precision_is_computed_in_float() -> None:
    """Logits of bfloat16 keys are float32: 256 and 257 cannot be told apart in bfloat16."""
    q = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    k = torch.tensor([[[256.0], [258.0]]], dtype=torch.bfloat16)
    v = torch.tensor([[[0.0], [1.0]]], dtype=torch.bfloat16)
    out, lse = ops.reference(q, k, v, None, 0.5)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert abs(float(out) - 1 / (1 + math.exp(-1))) < 4e-3
