"""Prompts read the lines of the attention map that hold most of it, tokens the rows that the newest ones look at, found
anew every few tokens (LoopServe, arXiv 2507.13681).

Promises that what is left out of a prompt's attention held at most the share 1 - `alpha` of it, in the rows that were
sampled, and exact attention over at most `budget` + `voters` + `every` rows for each decoded one. Nothing is ever given
up: what an early question did not need, a later one finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.drawers import Room
from phasewise.kv.format import KVShape
from phasewise.methods.attend._lines import AttentionLines, attend, cover, masses, sampled
from phasewise.methods.attend._select import tally
from phasewise.model.config import ModelConfig
from phasewise.ops import attention as ops
from phasewise.ops.native.abi import LayerChoiceStruct
from phasewise.ops.native.choice import CHOSEN, SHARE, Ballot, Candidates, choose, takes
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, ChosenSlots, Custom, NamedSlots
from phasewise.step.read import Read
from phasewise.step.reference import NEVER, attend_named, single
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME, HEARD = "loopserve", -1


@dataclass(frozen=True)
class LoopServe(Method):
    """A prompt: `sample` of its rows, spread over all of them, say how each KV head spreads its attention. Columns and
    diagonals of the map, in blocks of `block`, are added one by one, each the one that holds most of what the others
    miss, until they hold the share `alpha`; the first column and the own blocks always belong to them. What lies on
    none of them is not multiplied.

    A conversation's next turn (`decode=pie`, `after=ID`) takes the rows that the turns before left, all of them, and
    computes the new ones: their lines, found by rows among them, run over old keys and new. Of a text that was edited
    each run of new tokens comes in one piece, and has lines of its own.

    Tokens: at the prompt's end, and after every `every` tokens, the queries of the last `voters` rows vote, each with
    its softmax, for the rows before them; the `budget` rows of most votes per KV head, the voters and all that follow
    are what the next `every` tokens read. `every=0` chooses at the prompt's end and never again: that is no LoopServe,
    but the control of its claim (`phasewise reproduce loopserve`).

    Rows that were taken from elsewhere have no queries here: where fewer than `voters` came after them, these vote.

    A choice reads all keys, once in `every` tokens; drafts end where one is due. Chosen rows and queries are booked
    beside the KV. Prompts come in one piece, and what they leave hangs on all of them, so nobody shares their prefixes.
    Left out: lines by query head, which would read a KV head's rows several times.
    """

    alpha: float = 0.95
    budget: int = 256
    every: int = 16
    block: int = 32
    sample: int = 64
    voters: int = 16

    paper: ClassVar[str] = "arXiv 2507.13681"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"alpha": 1.0, "budget": 1 << 30}
    traits: ClassVar[Traits] = Traits(
        "attend", own_attention=True, whole_prompts=True, shares_prefix=False, accepts_injected=True
    )
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"budget": 96})
    tight: ClassVar[dict[str, object]] = {"alpha": 0.5, "budget": 6, "every": 4, "block": 4, "sample": 12,
                                         "voters": 4}  # fmt: skip

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise UserError(f"loopserve: alpha={self.alpha} must lie in (0, 1]: a share of attention; 1 is all of it")
        for name, least in (("budget", 1), ("every", 0), ("block", 1), ("sample", 1), ("voters", 1)):
            if getattr(self, name) < least:
                raise UserError(f"loopserve: {name}={getattr(self, name)} must be at least {least}")

    def border(self, prompt: int, at: int) -> int:
        """Where the rows that a row after the prompt reads were chosen: by those before this position."""
        return prompt + (at - prompt) // self.every * self.every if self.every else prompt

    def chooses(self, border: int) -> bool:
        """Whether more rows lie before the voters than may be read."""
        return border - self.voters > self.budget

    def bind(self, host: Host) -> Looping:
        return Looping(self, host.model.config)


Asked = tuple[dict[int, Tensor], int, Ballot]  # what is chosen by border, the border, and who asks


class Looping(Attend):
    """Runtime of LoopServe. A request's drawer holds by layer the queries of its last rows ("q" [w, H, G, D], "at" [w])
    and what was chosen at the last border: "chosen" positions [H, K] (-1: none), "border"; and, by HEARD, what whole
    steps have left since: positions, and queries of all layers [layers, H, G, D]."""

    ranks = True  # by `votes`, which kernels may count

    def __init__(self, knobs: LoopServe, config: ModelConfig) -> None:
        self.knobs, self.heads = knobs, config.heads
        self._prompts = AttentionPlan(Custom(self.attend))
        self._tokens = AttentionPlan(NamedSlots(self.slots, self._given))

    def drawer(self, layer: int, shape: KVShape, room: Room) -> int:
        """Queries twice, for what whole steps have left lies by itself."""
        knobs = self.knobs
        if not knobs.chooses(room.end):
            return 0
        queries = knobs.voters * (2 * self.heads * shape.dim * shape.dtype.itemsize + 8)
        return queries + min(knobs.budget, room.end) * shape.heads * 4

    def plan(self, span: Span) -> AttentionPlan:
        request = span.request
        if not self.knobs.chooses(self.knobs.border(request.prompt_len, request.limit)) and not self._lined(span):
            return EVERYTHING
        return self._tokens if span.positions[0] >= request.prompt_len else self._prompts

    def until(self, request: Request) -> int | None:
        """Rows behind the next border may be read by what those before it choose, once they are known to stay."""
        if not self.knobs.every:
            return None
        border = self.knobs.border(request.prompt_len, request.known - 1) + self.knobs.every
        return border if self.knobs.chooses(border) else None

    def _lined(self, span: Span) -> bool:
        """Whether it is a prompt's rows that read lines; they come whole, behind those that were given."""
        prefilling = span.positions[0] < span.request.prompt_len
        return prefilling and self.knobs.alpha < 1 and self.knobs.chooses(span.positions[-1] + 1)

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        """Rows of prompts read lines, if they come behind nothing else; others what was chosen."""
        out = attend_named(reads, self.slots(reads))
        for i, read in enumerate(reads):
            if read.span.last < read.span.request.prompt_len and self._lined(read.span) and read.rows is None:
                out[i] = attend(read, self.lines(read), self.knobs.block)
        return out

    def slots(self, reads: Sequence[Read]) -> list[Tensor | None]:
        """What rows read of what was chosen, and what is chosen now, as `NamedSlots` has it; their queries are
        noted."""
        out: list[Tensor | None] = [None] * len(reads)
        found: dict[int, dict[int, Tensor]] = {}
        ballots: list[Asked] = []
        for i, read in enumerate(reads):
            note = self._note(read)
            if read.span.last >= read.span.request.prompt_len:
                found[i] = self._choices(read, note, ballots)
        self._count(ballots)
        for i, chosen in found.items():
            if not chosen:
                continue
            out[i] = self._slots(reads[i], *next(iter(chosen.items()))) if single(reads[i]) else None
            if out[i] is None:
                out[i] = self._select(reads[i], chosen)
        return out

    # ---- whole steps
    def _given(self, span: Span) -> ChosenSlots | None:
        """What was chosen for a row, if that is so in all layers."""
        request, state = span.request, span.request.state.get(NAME, {})
        border = self.knobs.border(request.prompt_len, span.positions[0])
        layers = [own for layer, own in state.items() if layer != HEARD]
        if not layers or not self.knobs.chooses(border) or any(own.get("border") != border for own in layers):
            return None
        lists = [state[layer]["chosen"] for layer in range(len(layers))]
        return ChosenSlots(lists, border - self.knobs.voters, partial(self._heard, span))

    def _heard(self, span: Span, queries: Tensor) -> None:
        heads = span.kv.layers[0].shape.heads
        span.trail = {**(span.trail or {}), NAME: queries.view(len(queries), heads, -1, queries.shape[2])}

    @staticmethod
    def _caught_up(state: dict[int, Any]) -> None:
        """What whole steps have left becomes a part of every layer's queries."""
        heard = state.pop(HEARD, None)
        if heard:
            at, queries = torch.tensor([at for at, _ in heard]), torch.stack([q for _, q in heard], 1)
            for layer, own in state.items():
                own |= {"q": torch.cat((own["q"], queries[layer])), "at": torch.cat((own["at"], at.to(own["at"])))}

    # ---- prompts
    def lines(self, read: Read) -> AttentionLines:
        """What the rows of a prompt read, of those before them as well."""
        size = self.knobs.block
        some = sampled(read.q.shape[0], self.knobs.sample)
        return cover(masses(read, some, size), read.q_positions[some] // size, self.knobs.alpha)

    # ---- tokens
    def _choices(self, read: Read, note: dict[str, Any], ballots: list[Asked]) -> dict[int, Tensor]:
        """What the rows of a read go by: positions [h, K] by border, of those borders at which there was a choice.
        What kernels count is put into it once all have asked."""
        knobs, request = self.knobs, read.span.request
        borders = [knobs.border(request.prompt_len, at) for at in read.q_positions.tolist()]
        first = {border: row for row, border in reversed([*enumerate(borders)]) if knobs.chooses(border)}
        state: dict[int, Any] = request.state.get(NAME, {})
        self._caught_up(state)
        before: dict[str, Any] = state.get(read.layer, {})
        found: dict[int, Tensor] = {}
        for border in sorted(first):
            if before.get("border") == border:
                chosen = before["chosen"]
                found[border] = chosen if read.part.heads is None else chosen[read.part.heads]
            else:
                made = self._choose(read, border, first[border], self._voters(read, before, border))
                if isinstance(made, Ballot):
                    ballots.append((found, border, made))
                    found[border] = torch.empty(0)
                else:
                    found[border] = made
        note["chosen"] = found
        return found

    def _voters(self, read: Read, before: dict[str, Any], border: int) -> Tensor:
        """The queries of the rows right before a border, [w, hq, D]: of earlier steps, and of this one."""
        own = read.q_positions
        wanted = (own >= border - self.knobs.voters) & (own < border)
        queries = [read.q[wanted]]
        if before:
            known = before["q"] if read.part.heads is None else before["q"][:, read.part.heads]
            near = (before["at"] >= border - self.knobs.voters) & (before["at"] < border)
            queries.insert(0, (known if near.all() else known[near]).flatten(1, 2))
        return queries[0] if len(queries) > 1 and not len(queries[1]) else torch.cat(queries)

    def _choose(self, read: Read, border: int, row: int, queries: Tensor) -> Tensor | Ballot:
        """The positions that get most votes of those that a row sees before the voters, increasing int32 [h, K]; or who
        asks kernels for them."""
        part, spec = read.part, read.step.model.config.attention[read.layer]
        heads, n = part.size
        end = border - self.knobs.voters
        if part.plain:
            n = min(n, end)  # slots are positions: nobody else's keys are read
        read.count_keys(heads * n)
        positions = part.positions[:, :n]
        among = positions < end  # [1 | h, n]
        if (mask := read.mask()) is not None:
            among = among & mask[:, row, :n]
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            among = among.clone()
            among[:, slots[slots < n]] &= bool(delta[row] == 0)  # read in any case
        count = min(self.knobs.budget, n)
        if not len(queries):  # no row has run this layer
            return positions.new_full((heads, count), -1).int()
        if among.all() and (ballot := self._ballot(read, queries, n, count)) is not None:
            return ballot
        votes = self.votes(ops.scores(queries, part.keys(0, n), spec.scale, spec.softcap), among, (read, border))
        ranked = votes.masked_fill(~among, NEVER).nan_to_num(NEVER).sort(dim=-1, descending=True, stable=True)
        best = positions.expand(heads, -1).gather(1, ranked.indices[:, :count])
        return best.masked_fill(ranked.values[:, :count] == NEVER, -1).sort(-1).values.int()

    def _ballot(self, read: Read, queries: Tensor, n: int, count: int) -> Ballot | None:
        """On the best `count` of the first n slots, where kernels count votes."""
        part, heads = read.part, read.part.size[0]
        by_head = queries.view(len(queries), heads, -1, queries.shape[2]).transpose(0, 1)  # [h, w, G, D]
        planes = [plane[:, :n] for plane in part.planes[:2]]
        k, scale = planes if len(part.planes) == 4 else (planes[0], None)
        layer = LayerChoiceStruct(way=CHOSEN, scale=read.scale)
        among = Candidates(0, n, 1, count, SHARE, False, 0, n, width=queries.shape[2])
        ballot = Ballot(by_head.reshape(1, -1, queries.shape[2]), k, scale, among, n, layer)
        capped = read.step.model.config.attention[read.layer].softcap is not None
        if not self.ranks or capped or part.packed is not None or not takes(ballot):
            return None
        return ballot

    @staticmethod
    def _count(ballots: Sequence[Asked]) -> None:
        """What each asked for, in its place; in one call for all of one shape."""
        shapes: dict[tuple[int, int], list[Asked]] = {}
        for asked in ballots:
            shapes.setdefault((asked[2].q.shape[1], asked[2].k.shape[0]), []).append(asked)
        for alike in shapes.values():
            for (found, border, _), slots in zip(alike, choose([ballot for _, _, ballot in alike]), strict=True):
                found[border] = slots[:, 0]

    def votes(self, logits: Tensor, among: Tensor, about: tuple[Read, int]) -> Tensor:
        """Logits [h, G, w, n] of the voters to all rows, of which those `among` [1 | h, n] count -> votes [h, n]: the
        logarithm of what each gets of all softmaxes together. `about`: for whom, and at which border."""
        return tally(logits, among[:, None]).logsumexp(1)

    def _slots(self, read: Read, border: int, chosen: Tensor) -> Tensor | None:
        """For a single row whose slots are positions: those that it reads, int32 [h, 1, S]."""
        if bool((chosen[:, 0] < 0).any()):
            return None
        near = torch.arange(border - self.knobs.voters, read.part.size[1], dtype=torch.int32, device=chosen.device)
        return torch.cat((chosen, near.expand(len(chosen), -1)), 1)[:, None]

    def _select(self, read: Read, chosen: dict[int, Tensor]) -> Tensor:
        """What every row reads, bool [h, R, N]; rows without a choice read everything."""
        part, at = read.part, read.q_positions
        (heads, n), prompt = part.size, read.span.request.prompt_len
        positions = part.positions.expand(heads, -1)
        select = torch.zeros(heads, len(at), n, dtype=torch.bool, device=at.device)
        borders = torch.tensor([self.knobs.border(prompt, each) for each in at.tolist()], device=at.device)
        for border in sorted(set(borders.tolist())):
            rows = positions.new_ones(heads, n, dtype=torch.bool)
            if border in chosen:
                end = int(positions.max()) + 1
                listed = torch.zeros(heads, end + 1, dtype=torch.bool, device=at.device)
                listed.scatter_(1, chosen[border].long().masked_fill(chosen[border] < 0, end), True)
                rows = listed[:, :end].gather(1, positions) | (positions >= border - self.knobs.voters)
            select |= rows[:, None] & (borders == border)[:, None]
        if read.view is not None and read.view.moved is not None:
            slots, delta = read.view.moved
            select[:, :, slots] |= (delta != 0)[:, None]
        return select

    # ---- what is remembered of the rows that stay
    def _note(self, read: Read) -> dict[str, Any]:
        """A read's queries lie with the span until it is known which rows stay."""
        span = read.span
        if span.trail is None:
            span.trail = {}
        at, last = read.q_positions, span.request.prompt_len - self.knobs.voters
        rows = torch.nonzero(at >= last)[:, 0]  # of a prompt the last ones
        local = rows if read.rows is None else torch.tensor(read.rows, device=rows.device)[rows]
        heads, (_, all_heads, dim) = read.part.size[0], read.q.shape
        q = read.q[rows].view(len(rows), heads, all_heads // heads, dim)
        note: dict[str, Any] = {"q": q, "at": at[rows], "rows": local, "heads": read.part.heads, "chosen": {}}
        span.trail.setdefault(NAME, {})[read.layer, read.part.slab] = note
        return note

    def stayed(self, span: Span, keep: int | Sequence[int]) -> None:
        notes: Any = (span.trail or {}).pop(NAME, {})
        if isinstance(notes, Tensor):
            if keep if isinstance(keep, int) else len(keep):
                heard = span.request.state[NAME].setdefault(HEARD, [])
                heard.append((span.positions[0], notes))
                del heard[: -self.knobs.voters]
            return
        layers: dict[int, list[dict[str, Any]]] = {}
        for (layer, _), note in notes.items():
            layers.setdefault(layer, []).append(note)
        for layer, parts in layers.items():
            rows = parts[0]["rows"]
            kept = rows < keep if isinstance(keep, int) else torch.isin(rows, torch.tensor(list(keep)).to(rows))
            if bool(kept.any()):
                state = span.request.state.setdefault(NAME, {})
                self._caught_up(state)
                state[layer] = self._after(state.get(layer, {}), parts, kept, span.request.prompt_len)

    def _after(self, before: dict[str, Any], parts: list[dict[str, Any]], kept: Tensor, prompt: int) -> dict[str, Any]:
        """What is known of a layer once the rows `kept` of a span are there."""
        at = parts[0]["at"][kept]
        if len(parts) == 1:
            q = parts[0]["q"][kept]
        else:
            heads = sum(len(part["heads"]) for part in parts)
            q = parts[0]["q"].new_empty(len(at), heads, *parts[0]["q"].shape[2:])
            for part in parts:
                q[:, part["heads"]] = part["q"][kept]
        after = {key: before[key] for key in ("border", "chosen") if key in before}
        border = self.knobs.border(prompt, int(at[-1]))
        if all(border in part["chosen"] for part in parts) and after.get("border") != border:
            after |= {"border": border, "chosen": self._together([(p["heads"], p["chosen"][border]) for p in parts])}
        if before:
            q, at = torch.cat((before["q"], q)), torch.cat((before["at"], at))
        near = at > at[-1] - self.knobs.voters
        return after | {"q": q[near], "at": at[near]}

    @staticmethod
    def _together(parts: list[tuple[Tensor | None, Tensor]]) -> Tensor:
        """What parts of a layer have chosen, for all its heads."""
        if len(parts) == 1:
            return parts[0][1]
        wide = max(chosen.shape[1] for _, chosen in parts)
        every = parts[0][1].new_full((sum(len(chosen) for _, chosen in parts), wide), -1)
        for heads, chosen in parts:
            every[heads, wide - chosen.shape[1] :] = chosen
        return every
