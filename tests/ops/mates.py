"""What is read packed has the same bits beside any mates, on any number of threads, and row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phasewise.ops.native import spans
from phasewise.ops.native.spans import Few


def change_nothing(
    batch: Sequence[Any], mates: Sequence[Few], scale: float, threads: int, check: Callable[[Any, None, Any], object]
) -> None:
    """Spans of a `batch` (their `few`) and `mates` in one call: each as by itself, and the batch's as its `check` wants
    it, first and last rows by themselves too."""
    everybody = [*(kept.few for kept in batch), *mates]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together, _ = spans.attend(everybody, scale)
    finally:
        torch.set_num_threads(before)
    parts = together.split([few.q.shape[0] for few in everybody])
    for few, got in zip(everybody, parts, strict=True):
        assert torch.equal(spans.attend([few], scale)[0], got)
    for kept, got in zip(batch, parts):
        few, rows = kept.few, kept.few.q.shape[0]
        check(got, None, kept)
        for i in (0, rows - 1):
            end = few.k.shape[1] - rows + i + 1
            one = few._replace(q=few.q[i : i + 1], k=few.k[:, :end], v=few.v[:, :end])
            assert torch.equal(spans.attend([one], scale)[0], got[i : i + 1])
