"""Steps in which nobody looks inside a layer: all layers in one native call, where the model has one (`Model.stack`).

The open path of `forward` computes the same, operator by operator; tests/ops/test_native_stack.py holds them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phasewise.kv.buffer import Raw, entry_bytes
from phasewise.ops.native.spans import Common
from phasewise.ops.native.stack import StackSpan

if TYPE_CHECKING:
    from phasewise.batch import Span
    from phasewise.forward import Step

FEW = 64  # rows of a span; attention of more is worth matrix products, which the open path makes


def run_whole(step: Step) -> Tensor | None:
    """The rows after all layers [T, d], their keys and values appended; None, and nothing done, if one needs more."""
    stack, spans = step.model.stack, step.batch.spans
    if stack is None or step.taps or not all(_plain(span, stack.windowed) for span in spans):
        return None
    planes = _planes(spans)
    if planes is None:
        return None
    entries = 0  # (row, KV head) pairs read per layer
    parts = []
    for span in spans:
        layer = span.kv.layers[0]
        end = layer.n + span.rows
        entries += end * layer.shape.heads
        parts.append(StackSpan(end, span.rows, None if span.sees is None else span.sees.contiguous()))
    commons = _commons(spans, max(part.n for part in parts), [spec.window for spec in step.model.config.attention])
    entries -= sum(common.saved for common in commons) * spans[0].kv.layers[0].shape.heads
    x = stack(step.model.embed(step.batch.tokens), step.rotary.tables, parts, planes, commons)
    for span in spans:
        for layer in span.kv.layers:
            layer.appended(span.positions)
    layer = spans[0].kv.layers[0]
    each, layers = entry_bytes(layer.codec, layer.shape), len(spans[0].kv.layers)
    counters = step.counters
    counters.row_layers += x.shape[0] * layers
    counters.kv_bytes_read += entries * each * layers
    counters.kv_bytes_written += x.shape[0] * layer.shape.heads * each * layers
    return x


def _plain(span: Span, windowed: bool) -> bool:
    """Whether the span's rows run through all layers, read all that is before them, and show nobody anything."""
    phase = span.phase
    return (
        span.layers is None
        and span.rows <= FEW
        and phase.skip is None
        and phase.evict is None
        and getattr(phase.attend, "everything", False)
        and (span.sees is None or not windowed)
    )


def _commons(spans: Sequence[Span], longest: int, windows: Sequence[int | None]) -> list[Common]:
    """What spans of one attend method read in common; nothing where a window may hide some of it."""
    if any(window is not None and window < longest for window in windows):
        return []
    groups: dict[int, tuple[Any, list[int]]] = {}
    for i, span in enumerate(spans):
        if hasattr(span.phase.attend, "commons"):
            groups.setdefault(id(span.phase.attend), (span.phase.attend, []))[1].append(i)
    return [
        common._replace(members=tuple(index[m] for m in common.members))
        for attend, index in groups.values()
        for common in attend.commons([spans[i] for i in index])
    ]


def _planes(spans: Sequence[Span]) -> list[int] | None:
    """Where the spans' keys and values lie, as Stack takes it; None unless all heads and layers kept the same rows."""
    first = spans[0].kv.layers
    if type(first[0].codec) is not Raw or first[0].shape.device != "cpu":
        return None
    dim = first[0].shape.dim
    out: list[int] = []
    counts = [span.kv.layers[0].n for span in spans]
    for i in range(len(first)):
        for span, n in zip(spans, counts):
            layer = span.kv.layers[i]
            slab = layer.slabs[0] if len(layer.slabs) == 1 else None
            if slab is None or slab.n != n or slab.heads is not None or slab.positions is not None or layer.fresh:
                return None
            buffer = slab.buffer
            out += (*buffer.addresses, buffer.cap * dim)
    return out
