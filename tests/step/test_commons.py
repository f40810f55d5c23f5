"""What reads of one layer have in common is read once: equal to a softmax over everything, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.kv.buffer import Ledger
from phasewise.kv.format import KVShape, Raw, RowFormat
from phasewise.kv.layer_kv import LayerKV
from phasewise.methods.store.int8 import Int8
from phasewise.model.config import AttentionSpec
from phasewise.ops import native
from phasewise.ops.native.spans import Common, reaches
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.read import Read
from phasewise.step.reads import attend_all
from phasewise.step.span import Span, ancestors
from tests import double

LEVELS = {
    "one": [Common((0, 1, 2, 3), 0, 96, 0)],
    "two": [Common((0, 1, 2, 3), 0, 64, 0), Common((0, 2), 64, 192, 1), Common((1, 3), 64, 128, 1)],
    "three": [Common((0, 1, 2, 3), 0, 64, 0), Common((1, 2, 3), 64, 192, 1), Common((2, 3), 192, 1152, 2)],
    "some": [Common((3, 1), 0, 128, 0)],
}
OWN = (0, 5, 130, 1)  # rows behind what is shared, before the fresh ones
FRESH = (1, 4, 1, 6)


def reads_of(
    commons: Sequence[Common],
    softcap: float | None,
    format: RowFormat | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Read]:
    """Reads of four spans, the last one a tree, at a layer of 6 query heads and 2 KV heads."""
    gen = torch.Generator().manual_seed(1)
    shape, format, counters = KVShape(2, 16, dtype), format or Raw(), Counters()
    config = SimpleNamespace(attention=[AttentionSpec(window=None, scale=0.25, softcap=softcap)])
    step: Any = SimpleNamespace(model=SimpleNamespace(config=config), counters=counters, masks={}, notes={})
    long = max(reaches(commons, 4)) + max(OWN)
    rows = [torch.randn(2, 2, long, 16, generator=gen, dtype=dtype) for _ in range(4)]  # k and v
    for common in commons:
        for m in common.members:
            rows[m][:, :, common.start : common.stop] = rows[common.members[0]][:, :, common.start : common.stop]
    reads = []
    for reach, own, fresh, (k, v) in zip(reaches(commons, 4), OWN, FRESH, rows):
        n, layer = reach + own, LayerKV(shape, format, Ledger(1 << 40), long + 8)
        if n:
            layer.append(k[:, :n], v[:, :n], range(n))
            layer.commit(n)
        sees = ancestors([-1, 0, 0, 1, 1, 2]) if fresh == 6 else None
        positions = [n, n + 1, n + 1, n + 2, n + 2, n + 2] if fresh == 6 else range(n, n + fresh)
        layer.append(*torch.randn(2, 2, fresh, 16, generator=gen, dtype=dtype), positions)
        kv: Any = SimpleNamespace(layers=[layer])
        span = Span(Request([3]), kv, None, [3] * fresh, positions, sees)  # type: ignore[arg-type]
        reads.append(Read(step, 0, span, torch.randn(fresh, 6, 16, generator=gen, dtype=dtype), layer.read()[0]))
    return reads


def exact(read: Read) -> Tensor:
    """Softmax over all visible rows at once, in float64."""
    rows, n = read.q.shape[0], read.part.n
    own = torch.ones(rows, rows).tril().bool() if read.span.sees is None else read.span.sees
    seen = torch.cat((torch.ones(rows, n).bool(), own), 1)
    q = read.q.double().view(rows, 2, 3, 16)
    logits = torch.einsum("rhgd,hnd->hgrn", q, read.part.k.double()) * 0.25
    softcap = read.step.model.config.attention[0].softcap
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hgrn,hnd->rhgd", weights, read.part.v.double()).reshape(rows, 6, 16)


@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize(
    ("levels", "softcap"), [("one", 3.0), ("two", None), ("three", None), ("three", 3.0), ("some", None)]
)
def test_equals_attention_over_everything(
    levels: str, path: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        monkeypatch.setattr("phasewise.ops.native.spans.library", lambda: None)
    elif native.library() is None:
        pytest.skip("no native kernels here")
    reads = reads_of(LEVELS[levels], softcap)
    for got, read in zip(attend_all(reads, LEVELS[levels]), reads):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact(read), atol=2e-6, rtol=1e-5)
    rows = sum(read.part.size[1] for read in reads) - sum(common.saved for common in LEVELS[levels])
    assert reads[0].step.counters.kv_bytes_read == rows * 2 * (16 + 16) * 4  # 2 heads, keys and values, float32


@pytest.mark.parametrize("levels", ["two", "three"])
def test_in_double_precision_levels_are_exact(levels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-12, up to three of them, whoever has nothing of its own behind them but the row that asks."""
    double.everything(monkeypatch)
    monkeypatch.setattr("phasewise.ops.native.spans.library", lambda: None)
    reads = reads_of(LEVELS[levels], None, dtype=torch.float64)
    for got, read in zip(attend_all(reads, LEVELS[levels]), reads):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, exact(read), atol=1e-12, rtol=0)
    assert OWN[0] == 0 and max(common.level for common in LEVELS["three"]) == 2


class Counting:
    """int8 rows, which native kernels know or do not know, and how many of them were decoded."""

    def __init__(self, known: bool) -> None:
        self.format, self.rows, self.known = Int8().format(), 0, known

    def __getattr__(self, name: str) -> Any:
        return False if name == "scaled" and not self.known else getattr(self.format, name)

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self.rows += planes[0].shape[1]
        return self.format.decode(planes, dtype)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("levels", ["two", "three"])
def test_common_rows_are_decoded_once_or_read_as_they_are(levels: str, known: bool) -> None:
    format: Any = Counting(known)
    reads = reads_of(LEVELS[levels], None, format)
    format.rows = 0
    results = attend_all(reads, LEVELS[levels])
    once = sum(read.part.size[1] for read in reads) - sum(c.saved for c in LEVELS[levels])
    assert format.rows == (0 if known else once)
    for got, read in zip(results, reads):
        torch.testing.assert_close(got.double(), exact(read), atol=2e-6, rtol=1e-5)
