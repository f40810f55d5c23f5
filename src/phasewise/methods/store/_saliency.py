"""How much the rows of a block matter that has filled after the prompt: what its last row attends to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.kv.format import KVShape
from phasewise.model.config import ModelConfig
from phasewise.ops.native.weighed import Weighed, Weighs
from phasewise.request.request import Request
from phasewise.step.probe import probe
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict


class BlockSaliency(Evict):
    """The evict method beside a store whose blocks of `gap` rows are packed by saliency. It gives no row up.

    The last row of a block ends its step. What it gives the block's rows is noted along the path of rows that stay, and
    lies in the request's drawer `block` until the block is packed. What is known of a prompt's rows is a subclass's
    matter (`of_prompt`, `after_prompt`).
    """

    def __init__(self, block: str, gap: int, config: ModelConfig) -> None:
        self.block, self.gap, self.heads = block, gap, (config.kv_heads, config.heads)

    def lasts(self, span: Span) -> list[int]:
        """The rows of a span behind the prompt with which a block is full."""
        return [row for row, position in enumerate(span.positions) if (position + 1) % self.gap == 0]

    def weighs_last(self, span: Span) -> Weighs | None:
        """Prepares the weights of the last row of a block, which ends its step: native steps compute them."""
        last = span.rows - 1
        if span.request.prefilling or span.sees is not None or self.lasts(span) != [last]:
            return None
        n = span.positions[-1]
        room = Weighed(len(span.kv.layers), 1, self.heads, n + 1)

        def told() -> None:
            found = room.weights[:, :, n + 1 - self.gap : n + 1].sum(1)
            span.trail = {**(span.trail or {}), self.block: {layer: {last: own} for layer, own in enumerate(found)}}

        return Weighs(room, n, told)

    def note_lasts(self, read: Read) -> None:
        """Records the weights that rows, each the last of a block on its own path, give the rows of that block."""
        span, part = read.span, read.part
        assert read.rows is None, "all rows run this layer"
        rows = self.lasts(span)
        weights = probe(read, rows).sum((0, 1))  # [r, N]
        fresh = span.seen(torch.tensor(rows), torch.arange(part.fresh))
        if span.trail is None:
            span.trail = {}
        noted: dict[int, Tensor] = {}
        span.trail.setdefault(self.block, {})[read.layer] = noted
        for i, row in enumerate(rows):
            own = part.n + fresh[i].nonzero().flatten()
            noted[row] = weights[i, torch.cat((torch.arange(part.n), own))[-self.gap :].to(weights.device)]

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        request = span.request
        if request.prefilling:
            self.of_prompt(span, keep)
            return
        over = self.after_prompt(request)
        noted = (span.trail or {}).pop(self.block, {})
        last = keep - 1 if isinstance(keep, int) else keep[-1] if keep else -1
        found = {layer: weights[last] for layer, weights in noted.items() if last in weights}
        if found:
            request.state[self.block] = found
        for layer in range(len(span.kv.layers)) if found or over else ():
            span.kv.limit(layer, 4 * self.gap)

    def of_prompt(self, span: Span, keep: int | Sequence[int]) -> None:
        """Rows of a prompt have been committed."""

    def after_prompt(self, request: Request) -> bool:
        """Drop what was known of a prompt's rows, which are packed. Returns True if there was anything."""
        raise NotImplementedError

    def places(self, layer: int, shape: KVShape) -> int:
        return 0
