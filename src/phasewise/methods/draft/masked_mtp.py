"""Mask rows behind every token are answered through low-rank weights that no other row has, and a small sampler makes
guesses of them in turn ("Your LLM knows the future", arXiv 2507.11851): exact under every verifier that keeps chosen
guesses exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.lowrank import Delta
from phasewise.request.request import Request
from phasewise.speculation.heads.block import packed
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.masked_mtp import MaskedHeads, MaskSampler
from phasewise.speculation.heads.masked_mtp_layout import masked_heads
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "masked_mtp"
DEEPEST = 8  # guesses in a row


@dataclass(frozen=True)
class MaskedMTP(Method):
    """A chain of at most `depth` guesses, with mask rows behind tokens of the pass.

    A mask row is a trained embedding at the position of a token to come. It sees what the token before the masks sees,
    that token, and the masks before it there; no real row sees any, and none stays in the KV. Mask rows alone run with
    low-rank weights beside every linear layer: y = W x + [x is a mask row] B A x. So real rows are the model's own,
    bit for bit.

    The states of the masks behind the last accepted token are what the next pass guesses by. The sampler, a small MLP,
    reads the pending token and the first state, and the model's output matrix chooses the first guess; then it reads
    that guess and the second state, and so on. sampler=false: the output matrix reads the states themselves.

    masks=quadratic: `depth` masks stand behind the pending token and behind each guess, so that whatever is accepted
    there are guesses for the next pass; a pass has up to depth (depth + 2) rows beside the pending token's.
    masks=linear: they stand behind the last guess alone, and after a rejection a pass has nothing to guess by.

    All rows run all layers, in one pass. A pass after a prompt, or after rows were computed anew, has the pending
    token's masks alone.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder of `phasewise train heads
    masked_mtp`; or `random:SEED`. `depth` is at most the number of masks that were trained. Guesses are chosen, not
    drawn. Left out: masks behind a prompt's last slice.
    """

    heads: str = AUTO
    depth: int = 3
    masks: Literal["quadratic", "linear"] = "quadratic"
    sampler: bool = True

    paper: ClassVar[str] = "arXiv 2507.11851"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"depth": 2}

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= DEEPEST:
            raise UserError(f"{NAME}: depth={self.depth} must be from 1 to {DEEPEST}")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.depth * (self.depth + 2))

    def bind(self, host: Host) -> MaskedDrafter:
        return MaskedDrafter(host, masked_heads(host.model, self.heads), self)


@dataclass(frozen=True)
class _MaskPlan:
    """How many guesses a draft has, and the masks behind the pending token and behind each of them."""

    guesses: int
    masks: Sequence[int]

    @property
    def rows(self) -> int:
        return self.guesses + sum(self.masks)


class MaskedDrafter(Drafter):
    """Masked multi-token prediction in one engine. Of a request it keeps the last layer's rows of the masks behind the
    token before the pending one, as `request.state` has it: the number of tokens for which they hold, and the rows
    [masks, d]."""

    def __init__(self, host: Host, heads: MaskedHeads, knobs: MaskedMTP) -> None:
        self.model, self.counters, self.everywhere = host.model, host.counters, knobs.masks == "quadratic"
        self.depth, dtype = min(knobs.depth, heads.depth), host.model.dtype
        self.masks = heads.masks.detach()[: self.depth].to(host.model.device, dtype)
        self.tuned = Delta(heads.deltas(), dtype, host.model.device)
        self.dtype = dtype if dtype == torch.bfloat16 else torch.float32  # that the sampler runs in
        sampler = heads.sampler.to(host.model.device, self.dtype).requires_grad_(False)
        self.sampler = packed(sampler) if knobs.sampler else None

    # ---- how large
    def size(self, request: Request) -> int:
        return next(self._plans(request)).rows

    def reach(self, context: int) -> int:
        return ENDLESS

    def _plans(self, request: Request) -> Iterator[_MaskPlan]:
        """What may be asked of the model next, the largest first: with one guess fewer each time, then with one mask
        fewer. The next draft needs no guess beyond the text's end, and no mask for one."""
        levels = headroom(request)
        for guesses in range(min(len(self._known(request)), levels), 0, -1):
            masks = [self._behind(guess, guesses, levels) for guess in range(guesses + 1)]
            yield _MaskPlan(guesses, masks)
        for own in range(self._behind(0, 0, levels), -1, -1):
            yield _MaskPlan(0, (own,))

    def _behind(self, guess: int, guesses: int, levels: int) -> int:
        """The number of masks behind a guess, counted from 1 on, of so many; 0 is the pending token."""
        return max(0, min(self.depth, levels - guess - 1)) if self.everywhere or guess == guesses else 0

    def _known(self, request: Request) -> Tensor:
        """The rows by which a request is guessed for, [at most depth, d]."""
        known, rows = request.state.get(NAME, (-1, None))
        return self.masks[:0] if known != request.known or rows is None else rows

    # ---- drafts
    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        plans = [next(plan for plan in self._plans(request) if plan.rows <= max(0, budget))
                 for request, budget in zip(requests, budgets)]  # fmt: skip
        asked = [(request, plan.guesses) for request, plan in zip(requests, plans) if plan.guesses]
        found = iter(self.guesses(asked) if asked else ())
        return [self._made(plan, next(found) if plan.guesses else ()) for plan in plans]

    def guesses(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """So many guesses for each request, in order. All requests' guesses of one depth are made together."""
        counts = [count for _, count in asked]
        rows = torch.cat([self._known(request)[:count] for request, count in asked])
        self.counters.head_rows += len(rows)
        if self.sampler is None:
            each = [*self.model.head(rows).argmax(-1).split_with_sizes(counts)]
        else:
            states, pending = self.model.norm(rows).to(self.dtype), [request.tokens[-1] for request, _ in asked]
            each = self._in_turn(self.sampler, states, counts, torch.tensor(pending, device=rows.device))
        return [own.tolist() for own in each]

    def _in_turn(self, sampler: MaskSampler, states: Tensor, counts: Sequence[int], tokens: Tensor) -> list[Tensor]:
        """So many guesses of each request, one after the other. states [all guesses, d] of their masks, request by
        request; tokens int64 [requests]: the pending ones."""
        starts, found = [*accumulate(counts, initial=0)], list[Tensor]()
        for depth in range(max(counts)):
            deep = [i for i, count in enumerate(counts) if count > depth]
            own, at = (torch.tensor(each, device=states.device) for each in (deep, [starts[i] + depth for i in deep]))
            made = sampler(self.model.embed(tokens[own]).to(self.dtype), states[at]).to(self.model.dtype)
            tokens = tokens.index_copy(0, own, self.model.unembed(made).argmax(-1))
            found.append(tokens)
        return [row[:count] for row, count in zip(torch.stack(found, 1), counts)]

    def _made(self, plan: _MaskPlan, tokens: Sequence[int]) -> Draft | None:
        """The guesses of a plan, then the masks."""
        draft = Draft.chain(tokens)
        for above, count in enumerate(plan.masks, -1):
            for _ in range(count):
                above = draft.add(above, 0)  # no token: its row is given
                draft.ask += 1
        if draft.ask:
            which = [*chain.from_iterable(range(count) for count in plan.masks)]
            draft.given, draft.tuned = self.masks[torch.tensor(which, device=self.masks.device)], self.tuned
        return draft if draft.tokens else None

    # ---- what the pass says
    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for span, outcome in zip(spans, outcomes):
            if span.note is None or span.note.given is None:
                continue  # none of its rows is a mask's
            last = outcome.keep - 1 if isinstance(outcome.keep, int) else outcome.keep[-1]
            nodes, first = span.note.asking(last - 1), span.start + 1
            said = hidden.x[first + nodes.start : first + nodes.stop].clone()
            span.request.state[NAME] = (span.request.known + len(outcome.tokens), said)
