"""LoopServe by the book: every row by itself, everything from scratch, in plain lists. For rows that come in order; the
first ones of a prompt may be there already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.methods.attend.loopserve import LoopServe
from phasewise.ops import attention as ops
from phasewise.step.read import Read
from tests.asking import Asking


def greedy(mass: list[list[float]], at: list[int], alpha: float) -> tuple[list[int], list[int]]:
    """Columns and diagonals in the order in which they are taken, of mass[row][block], rows being in blocks `at`."""
    blocks = len(mass[0])
    cells = {(row, block): mass[row][block] for row in range(len(at)) for block in range(at[row] + 1)}
    total = sum(cells.values())
    columns, diagonals = [0], [0]

    def held(kind: str, number: int) -> list[tuple[int, int]]:
        return [(r, b) for r, b in cells if (b if kind == "column" else at[r] - b) == number]

    for kind, number in (("column", 0), ("diagonal", 0)):
        for cell in held(kind, number):
            del cells[cell]
    while sum(cells.values()) > (1 - alpha) * total:
        gains = {(kind, i): 0.0 for kind in ("column", "diagonal") for i in range(blocks)}
        for (row, block), weight in cells.items():
            gains["column", block] += weight
            gains["diagonal", at[row] - block] += weight
        kind, number = max(gains, key=lambda line: gains[line])  # of equal ones the first
        (columns if kind == "column" else diagonals).append(number)
        for cell in held(kind, number):
            del cells[cell]
    return columns, diagonals


class SlowLoop(Asking):
    """What each row reads is noted in `selected`: (layer, head, position) -> positions."""

    def __init__(self, knobs: LoopServe) -> None:
        self.knobs = knobs
        self.selected: dict[tuple[int, int, int], list[int]] = {}
        self.queries: dict[tuple[int, int, int], Tensor] = {}  # by layer, KV head and position, [G, D]
        self.chosen: dict[tuple[int, int, int], list[int]] = {}  # by layer, head and border

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self._read(read) for read in reads]

    def _read(self, read: Read) -> Tensor:
        heads, n = read.part.size
        at = read.q_positions.tolist()
        positions = read.part.positions.expand(heads, n).tolist()
        mask = read.mask()
        seen = torch.ones(heads, len(at), n, dtype=torch.bool) if mask is None else mask.expand(heads, len(at), n)
        select = torch.zeros(heads, len(at), n, dtype=torch.bool)
        prompt = read.span.request.prompt_len
        for h in range(heads):
            head = h if read.part.heads is None else int(read.part.heads[h])
            own = read.q.unflatten(1, (heads, -1))[:, h].clone()  # [R, G, D]
            self.queries |= {(read.layer, head, position): own[row] for row, position in enumerate(at)}
            lines = self._lines(read, h) if at[-1] < prompt and self._long(at[-1] + 1) else None
            for row, position in enumerate(at):
                visible = [slot for slot in range(n) if bool(seen[h, row, slot])]
                if position < prompt:
                    slots = visible if lines is None else [s for s in visible if self._on(lines, position, s)]
                else:
                    slots = self._after(read, (h, head), position, [(positions[h][s], s) for s in visible])
                select[h, row, slots] = True
                self.selected[read.layer, head, position] = sorted(positions[h][s] for s in slots)
        return ops.reference(read.q, read.part.k, read.part.v, select, read.scale)[0]

    # ---- prompts
    def _long(self, prompt: int) -> bool:
        return self.knobs.alpha < 1 and prompt - self.knobs.voters > self.knobs.budget

    def _lines(self, read: Read, h: int) -> tuple[list[int], list[int]]:
        rows, size = read.q.shape[0], self.knobs.block
        some = sorted({max(0, (i + 1) * rows // self.knobs.sample - 1) for i in range(self.knobs.sample)})
        at, mass = [read.part.n + row for row in some], []
        blocks = -(-read.part.size[1] // size)
        for row, position in zip(some, at):
            group, seen = read.q[row].view(read.part.size[0], -1, read.q.shape[2])[h], read.part.k[h, : position + 1]
            weights = sum((seen @ q * read.scale).double().softmax(0) for q in group) / len(group)
            mass.append([float(weights[b * size : (b + 1) * size].sum()) for b in range(blocks)])
        return greedy(mass, [position // size for position in at], self.knobs.alpha)

    def _on(self, lines: tuple[list[int], list[int]], position: int, slot: int) -> bool:
        size = self.knobs.block
        return slot // size in lines[0] or position // size - slot // size in lines[1]

    # ---- tokens
    def _after(self, read: Read, heads: tuple[int, int], at: int, visible: list[tuple[int, int]]) -> list[int]:
        knobs, prompt, (h, head) = self.knobs, read.span.request.prompt_len, heads
        border = prompt
        while knobs.every and border + knobs.every <= at:
            border += knobs.every
        first = border - knobs.voters
        if first <= knobs.budget:
            return [slot for _, slot in visible]
        key = read.layer, head, border
        if key not in self.chosen:
            rivals = [(position, slot) for position, slot in visible if position < first]
            votes = torch.zeros(len(rivals), dtype=torch.float64)
            for voter in range(first, border):
                for one in self.queries.get((read.layer, head, voter), ()):  # none of rows that were given
                    votes += (read.part.k[h, [slot for _, slot in rivals]] @ one * read.scale).double().softmax(0)
            order = sorted(range(len(rivals)), key=lambda i: -float(votes[i]))[: knobs.budget]
            self.chosen[key] = [rivals[i][0] for i in order]
        return [slot for position, slot in visible if position >= first or position in self.chosen[key]]
