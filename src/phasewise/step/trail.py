"""State that methods keep of a request's rows at a layer, along the path of those that stayed.

A step may bring rows that will not stay (drafts, masks still to be filled in), and may be tried again. So what its rows
make of the state lies with the span, until the engine says which of them it has committed (`stayed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from phasewise.step.probe import Shaped, received

if TYPE_CHECKING:
    from phasewise.request.request import Request
    from phasewise.step.read import Read
    from phasewise.step.span import Span

State = Tensor | list[Tensor]  # a number per slot of every head, [H, n] or one [n] per head where these differ


class _Note(NamedTuple):
    """States [h, K, N] after some rows (numbers of the read's) of a step, over its committed and fresh slots."""

    after: Tensor
    rows: Sequence[int]
    n: int  # committed slots
    ids: Sequence[int] | None  # the fresh slots' rows of the span, where some skip the layer
    heads: Sequence[int] | None


class Trail:
    """A running state per request and layer: a number for every slot and head, plain tensors in the drawer `name`.

    So it travels at a hand-off, is copied at a fork, dies at a preemption and is made again as rows are replayed. All
    heads may share one (a state [1, n]), as long as they keep the same rows.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def before(self, read: Read) -> Tensor | None:
        """The state of the committed slots of the read's heads, [h, n]; None: nothing has been noted yet."""
        state = self.layers(read.span.request).get(read.layer)
        if state is None or isinstance(state, Tensor):
            return state
        heads = range(len(state)) if read.part.heads is None else read.part.heads.tolist()
        return torch.stack([state[head] for head in heads])

    def add(self, read: Read, rows: range, shaped: Shaped | None = None) -> None:
        """Add to every slot what it gets of the weights of `rows`, some of a read without drafts; see `received`."""
        heads, n = read.part.size
        before, done = self.before(read), 0
        state = torch.zeros(heads, n, device=read.q.device) if before is None else pad(before, (0, n - before.shape[1]))
        states, stops = list[Tensor](), ends(read)
        for stop in stops:
            some = range(max(done, rows.start), min(stop, rows.stop))
            if some:
                state = state + received(read, some, shaped)
            states.append(state)
            done = stop
        if states:
            self.note(read, [stop - 1 for stop in stops], torch.stack(states, 1))

    def note(self, read: Read, rows: Sequence[int], after: Tensor) -> None:
        """The states [h, len(rows), N] after some rows (numbers of the read's): the last row that stays must be one of
        them. What a row's state says of slots that are not on its own path does not matter."""
        span, part = read.span, read.part
        if span.trail is None:
            span.trail = {}
        heads = None if part.heads is None else part.heads.tolist()
        noted = span.trail.setdefault(self.name, {})
        noted[read.layer, part.slab] = _Note(after, rows, part.n, read.rows, heads)

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        """The first `keep` rows of the span, or those of a path, are committed: their state is the request's."""
        noted: dict[tuple[int, int], _Note] = (span.trail or {}).pop(self.name, {})
        if not noted:
            return
        kept = range(keep) if isinstance(keep, int) else keep
        layers = span.request.state.setdefault(self.name, {})
        for (layer, _), note in noted.items():
            if note.ids is None:
                slots: Sequence[int] = kept
            else:
                wanted = set(kept)
                slots = [slot for slot, row in enumerate(note.ids) if row in wanted]
            if not slots:
                continue
            assert slots[-1] in note.rows, "the last row that stays has left no state"
            state = note.after[:, note.rows.index(slots[-1])]
            if list(slots) == list(range(len(slots))):
                state = state[:, : note.n + len(slots)].clone()  # a view would keep what all rows have left
            else:
                fresh = torch.tensor([note.n + slot for slot in slots], device=state.device)
                state = torch.cat((state[:, : note.n], state[:, fresh]), 1)
            if note.heads is None:
                layers[layer] = state
            else:
                layers[layer] = list(layers[layer])  # another: who holds on to the state finds it as it was
                for head, own in zip(note.heads, state):
                    layers[layer][head] = own

    def kept(self, request: Request, layer: int, slots: Tensor | Sequence[Tensor]) -> None:
        """Keep the state of some committed slots alone: one list [K] for all heads, [H, K], or one per head."""
        layers = self.layers(request)
        state = layers[layer]
        if isinstance(slots, Tensor) and slots.dim() == 1:
            assert isinstance(state, Tensor)
            layers[layer] = state[:, slots]
        elif isinstance(slots, Tensor) and isinstance(state, Tensor):
            layers[layer] = state.gather(1, slots)
        else:
            layers[layer] = [own[stay] for own, stay in zip(state, slots)]

    def layers(self, request: Request) -> dict[int, State]:
        """The state of a request now, by layer."""
        found: dict[int, State] = request.state.get(self.name, {})
        return found

    def drop(self, request: Request, layer: int) -> State | None:
        """Forget a layer. -> what was known"""
        return self.layers(request).pop(layer, None)


def ends(read: Read) -> list[int]:
    """The numbers of the read's rows that may stay, drafts aside: all, or all before the last block, which may be
    denoised once more."""
    span = read.span
    stops = [span.rows]
    if span.block > 1:
        stops = sorted({span.rows, (span.rows - 1) // span.block * span.block})
    if read.rows is not None:
        stops = sorted({sum(row < stop for row in read.rows) for stop in stops})
    return [stop for stop in stops if stop]
