"""One span's rows reading one layer's KV: the object every attend, evict and view method works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.kv.buffer import entry_bytes
from phasewise.ops import attention as ops

if TYPE_CHECKING:
    from phasewise.batch import Span
    from phasewise.forward import Step
    from phasewise.kv.layer_kv import Part


@dataclass(slots=True)
class View:
    """What an evicting method lets rows see. `mask` bool [1 | h, R, N] or None.

    `moved` = (slots [M], delta [R]): row r reads those slots as if their positions were `delta[r]` larger.
    """

    mask: Tensor | None
    moved: tuple[Tensor, Tensor] | None = None


class Read:
    """Rows q [R, hq, D] of one span against k, v [h, N, D] of its KV at one layer (all heads, or those of one slab)."""

    __slots__ = ("at", "layer", "part", "q", "rows", "span", "step", "view")

    def __init__(self, step: Step, layer: int, span: Span, q: Tensor, part: Part) -> None:
        self.step = step
        self.layer = layer
        self.span = span
        self.q = q
        self.part = part
        self.rows: list[int] | None = None  # local rows, when some skip this layer
        self.at = slice(0, 0)  # rows of the layer's input they come from
        self.view: View | None = None

    # ---- what is where
    @property
    def scale(self) -> float:
        return self.step.model.config.attention[self.layer].scale

    @property
    def q_positions(self) -> Tensor:
        """int64 [R]."""
        positions = self.span.positions
        if self.rows is not None:
            positions = [positions[r] for r in self.rows]
        return torch.tensor(list(positions), device=self.q.device)

    @property
    def state(self) -> dict[str, object]:
        return self.span.request.state

    # ---- who sees what
    def mask(self) -> Tensor | None:
        """Visibility from positions, the span's own structure, the layer's window and the evicting method.

        bool [1 | h, R, N]; None = everything is visible.
        """
        own = self._own_mask()
        if self.view is None or self.view.mask is None:
            return own
        return self.view.mask if own is None else own & self.view.mask

    def _own_mask(self) -> Tensor | None:
        window = self.step.model.config.attention[self.layer].window
        part, rows = self.part, self.q.shape[0]
        if window is not None and max(self.span.positions) < window:
            window = None
        if rows == 1 and part.fresh == 1 and window is None:
            return None
        if not part.plain or self.rows is not None:
            return self._build(window)
        key = (id(self.span), window, part.n)
        if key not in self.step.masks:
            self.step.masks[key] = self._build(window)
        return self.step.masks[key]

    def _build(self, window: int | None) -> Tensor:
        part, device = self.part, self.q.device
        rows = torch.arange(self.span.rows, device=device) if self.rows is None else torch.tensor(self.rows)
        ids = torch.arange(part.fresh, device=device) if part.ids is None else part.ids
        sees = self.span.sees
        fresh = ids[None, :] <= rows[:, None] if sees is None else sees[rows][:, ids]  # [R, fresh]
        mask = torch.cat((fresh.new_ones(len(rows), part.n), fresh), 1)[None]
        if window is not None:
            mask = mask & (self.q_positions[None, :, None] - part.positions[:, None, :] < window)
        return mask

    # ---- attention
    def attend(self, select: Tensor | None = None) -> Tensor:
        """Exact attention over what is visible and, if given, selected (bool [1 | h, R, N]). -> [R, hq, D]."""
        part, spec = self.part, self.step.model.config.attention[self.layer]
        if select is None:
            self.count(part.n + part.fresh)
            if self.view is None and self._causal(spec.softcap, spec.window):
                return ops.causal(self.q, part.k, part.v, spec.scale)
        mask = self.mask()
        if select is not None:
            mask = select if mask is None else mask & select
            self.count_entries(int(mask.any(1).sum()) * (part.k.shape[0] // mask.shape[0]))
        if self.view is not None and self.view.moved is not None:
            return self._attend_moved(mask, spec.softcap)
        return ops.attention(self.q, part.k, part.v, mask, spec.scale, spec.softcap)

    def attend_rows(self, index: Tensor) -> Tensor:
        """For one query row: exact attention over the slots `index` [h, S] only, reading nothing else. -> [1, hq, D]."""
        assert self.q.shape[0] == 1 and (self.view is None or self.view.moved is None)
        part, spec = self.part, self.step.model.config.attention[self.layer]
        self.count_entries(index.numel())
        wide = index[..., None].expand(-1, -1, part.k.shape[2])
        mask = self.mask()
        if mask is not None:
            mask = mask[:, 0].expand(index.shape[0], -1).gather(1, index)[:, None]
        return ops.attention(
            self.q, part.k.gather(1, wide), part.v.gather(1, wide), mask, spec.scale, spec.softcap
        )

    def _causal(self, softcap: float | None, window: int | None) -> bool:
        """Whether the rows simply see everything before them."""
        plain = self.span.sees is None and self.rows is None and self.part.ids is None and softcap is None
        return plain and self.q.shape[0] > 1 and (window is None or max(self.span.positions) < window)

    def _attend_moved(self, mask: Tensor | None, softcap: float | None) -> Tensor:
        """Rows whose keys are read at another position: rotate the query the other way, and merge by log-sum-exp."""
        assert self.view is not None and self.view.moved is not None
        slots, delta = self.view.moved
        part = self.part
        if mask is None:
            mask = torch.ones(1, self.q.shape[0], part.k.shape[1], dtype=torch.bool, device=self.q.device)
        rest = mask.clone()
        rest[:, :, slots] = False
        back = self.step.model.rotate(self.layer, self.q, -delta[:, None])
        still = ops.reference(self.q, part.k, part.v, rest, self.scale, softcap)
        moved = ops.reference(back, part.k[:, slots], part.v[:, slots], mask[:, :, slots], self.scale, softcap)
        return ops.merge([still, moved])

    # ---- counters
    def count(self, rows: int) -> None:
        """`rows` cached rows of every head were read."""
        self.count_entries(rows * self.part.k.shape[0])

    def count_entries(self, entries: int) -> None:
        """`entries` (row, KV head) pairs were read."""
        layer = self.span.kv.layers[self.layer]
        self.step.counters.kv_bytes_read += entries * entry_bytes(layer.codec, layer.shape)
