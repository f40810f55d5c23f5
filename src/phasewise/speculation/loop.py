"""The decode loop of every drafter: drafts become spans, verified paths become outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.speculation.tails import Tails
from phasewise.step.phase import Hidden, Phase
from phasewise.step.read import FEW
from phasewise.step.span import Span, ancestors, depths
from phasewise.verbs.decode import Decode, Outcome, catching_up, draw_outcomes, slice_span
from phasewise.verbs.draft import Draft, headroom, judged
from phasewise.verbs.host import Host
from phasewise.verbs.sample import (
    NOTHING,
    Context,
    Dist,
    Purpose,
    distribution,
    distribution_shown,
    nothing_left,
    uniform,
)
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Shown

if TYPE_CHECKING:
    from phasewise.request.request import Request
    from phasewise.verbs.draft import Drafter
    from phasewise.verbs.verify import Verifier


def pending(request: Request) -> int:
    """Known tokens that are not computed yet: of its prompt while it is prefilling, then of all."""
    return (request.prompt_len if request.prefilling else request.known) - request.computed


def slices(requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
    """Returns the spans of plain decoding: the pending tokens of all requests, within the budgets."""
    return [slice_span(request, budget, phase) for request, budget in zip(requests, budgets)]


def sure(host: Host, request: Request) -> Sequence[int]:
    """Tokens that follow the request's text for certain: as many as one pass shall have, and before its last."""
    if request.params.ask is None or catching_up(request):
        return ()
    return host.sample.sure(request)[: min(headroom(request), FEW - 1)]


def sure_span(request: Request, follows: Sequence[int], phase: Phase) -> Span:
    """Rows: the pending token, then what follows it for certain."""
    assert request.kv is not None
    tokens, start = [request.tokens[-1], *follows], request.computed
    return Span(request, request.kv, phase, tokens, range(start, start + len(tokens)), sure=tuple(follows))


def draft_span(request: Request, draft: Draft, phase: Phase, device: torch.device | str = "cpu") -> Span:
    """Rows: the pending token, then the draft's nodes. Siblings share a position; each sees only its ancestors, by a
    mask on `device`, the model's."""
    assert request.kv is not None
    tree = [-1, *(parent + 1 for parent in draft.parents)]
    start = request.computed
    if len(tree) <= FEW and tree == list(range(-1, len(tree) - 1)):  # a chain is causal; a long one is no prompt slice
        return Span(
            request, request.kv, phase, [request.tokens[-1], *draft.tokens], range(start, start + len(tree)), note=draft
        )
    positions = [start + d for d in depths(tree)]
    return Span(
        request, request.kv, phase, [request.tokens[-1], *draft.tokens], positions,
        sees=ancestors(tree, device), note=draft,
    )  # fmt: skip


def contexts_of(span: Span) -> list[Context]:
    """Returns the contexts of the rows of a span after which a token is judged or drawn."""
    rows = judged(span)
    if span.note is None:
        return [Context(span.request, span.sure) for _ in rows]
    return [Context(span.request, path) for path in ((), *span.note.paths(len(rows) - 1))]


def told(host: Host, spans: list[Span]) -> list[Span]:
    """The same spans, once the sample method knows what it will be asked after them."""
    asking = [span for span in spans if span.request.params.ask is not None]
    if asking:
        host.sample.ahead([context for span in asking for context in contexts_of(span)])
    return spans


class Speculation(Decode):
    """The decode loop of every drafter: propose pending token + draft, verify, keep the accepted path.

    Prompts and replays go through as plain slices. With no draft a step is one ordinary row. Where the sample method
    knows for certain what follows (`Sample.sure`), that takes the place of a guess, and no verifier is asked.

    A request's tokens depend on itself alone (DESIGN law 4). Where they are the same whatever is guessed (`matches`:
    the verifier says for which drafts), load sizes the guesses: a scheduler may grant fewer rows, memory may be short
    for the drafter, a replay may end with a plain token. Everywhere else the guess is `whole`, a smallest unit: it is
    made at the same tokens and of the same size as if the request were alone. A span then exceeds what was granted, a
    replay stops before the last known token, and the drafter's companion gets its memory as the request does, others
    making way for it. What remains is what a drafter has learned of a request (in `request.state`), which goes in a
    preemption or hand-off: if its guesses hang on that, tokens under a verifier that does not match them may change.
    """

    def __init__(self, host: Host, drafter: Drafter, verifier: Verifier, traits: Traits) -> None:
        """`traits`: those of the drafter and the verifier together."""
        self.host, self.drafter, self.verifier, self.matches = host, drafter, verifier, traits.matches
        if drafter.companion is not None:
            drafter.companion.optional = self._sized
        drafter.sized_by(self._sized)
        self.drawer, self.token_rows = drafter.drawer, drafter.token_rows
        self._first_layers = drafter.first_layers
        if traits.matches == "none" and traits.begins_rows:
            raise UserError(
                f"{_name(drafter)} begins to compute its guesses in the memory that is reserved, and under the "
                f"verifier {_name(verifier)} tokens would depend on that; choose an exact verifier"
            )
        if traits.matches == "none" and traits.learns_across:
            raise UserError(
                f"{_name(drafter)} learns from all requests, and under the verifier {_name(verifier)} tokens would "
                "depend on them; let it learn from each request alone (scope=request), or choose an exact verifier"
            )
        self._drawn, self._top, self._wants = traits.drawn, traits.candidates, traits.wants
        if "thoughts" in self._wants:
            drafter.think()
        self._always = not traits.idles
        self._late = traits.late and not traits.wants  # nothing is shown of a row that was not computed
        self._guessing = True  # whether the drafter is to be asked in this step

    def reach(self, context: int) -> int:
        """Returns the positions that drafts reach: second models end texts where their context ends."""
        return self.drafter.reach(context)

    def displace(self, rows: int) -> None:
        """Tokens after the prompt stand so many positions further on: whoever drafts on their KV has to know."""
        if isinstance(self.drafter.companion, Tails):
            self.drafter.companion.beyond = rows
        if self._first_layers is not None:
            self._first_layers.beyond = rows

    def close(self) -> None:
        self.drafter.close()

    def whole(self, request: Request) -> bool:
        """True if its guesses have to be made, and in full, whatever the load."""
        if self.matches == "point":
            return self._drawn and self.drafter.draws(request)
        return self.matches == "none"

    def _sized(self, request: Request) -> bool:
        return not self.whole(request)

    def rows(self, request: Request) -> int:
        if request.prefilling:
            return request.prompt_len - request.computed
        if catching_up(request):
            return pending(request) - self.whole(request)
        if request.params.ask is not None and (certain := sure(self.host, request)):
            return 1 + len(certain)
        size = self.drafter.size(request)
        if not size or headroom(request) <= 0:
            return 1
        self._guessing = True
        return 1 + size

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        if self._first_layers is None:
            return self._spans(requests, budgets, phase)
        with self._first_layers.lent(phase):
            spans = self._spans(requests, budgets, phase)
            for span in spans:
                self._first_layers.hand_over(span)
        return spans

    def _spans(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans = [self._unguessed(request, budget, phase) for request, budget in zip(requests, budgets)]
        ready = [i for i, span in enumerate(spans) if span is None]
        if ready:
            nodes = [self._nodes(requests[i], budgets[i]) for i in ready]
            for i, most, draft in zip(ready, nodes, self.drafter.draft([requests[i] for i in ready], nodes)):
                if draft is not None and draft.tokens and most > 0:
                    assert draft.q is None or self.matches == "all" or self.whole(requests[i]), "drawn after all"
                    tree = draft.prune(headroom(requests[i])).cut(most)
                    spans[i] = self._entering(draft_span(requests[i], tree, phase, self.host.model.device), tree)
                else:
                    spans[i] = slice_span(requests[i], 1, phase)
        return told(self.host, [span for span in spans if span is not None])

    def _entering(self, span: Span, draft: Draft) -> Span:
        """The span of a draft, with the rows and low-rank weights of its nodes that bring some (`Draft.given`)."""
        if draft.given is not None:
            model, tokens = self.host.model, span.tokens[: span.rows - draft.ask]
            embedded = model.embed(torch.tensor(tokens, device=model.device))
            span.given = span.hidden = torch.cat((embedded, draft.given.to(embedded.dtype)))
        if draft.tuned is not None and draft.ask:
            span.tuned, span.untuned = draft.tuned, span.rows - draft.ask
        return span

    def _unguessed(self, request: Request, budget: int, phase: Phase) -> Span | None:
        """The span of a request for which nothing is guessed now; None: the drafter is asked."""
        if request.rows == 1 and not self._guessing and request.params.ask is None:
            return slice_span(request, 1, phase)  # a step without guesses takes no time here
        if catching_up(request):
            return slice_span(request, min(budget, self.rows(request)), phase)
        if follows := sure(self.host, request):
            return sure_span(request, follows if self.whole(request) else follows[: budget - 1], phase)
        return None

    def _nodes(self, request: Request, budget: int) -> int:
        """The most that may be guessed in a step that grants `budget` rows."""
        rows = self.rows(request)
        return (rows if self.whole(request) else min(budget, rows)) - 1

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        self._guessing = self._always
        if not (self._top or self._wants or self._late) and all(span.note is None for span in spans):
            outcomes = draw_outcomes(self.host, spans, hidden)
            self.drafter.learn(spans, hidden, outcomes)
            return outcomes
        wanted: list[int] = []
        asking: list[int] = []
        contexts: list[Context] = []
        for span in spans:
            rows = judged(span)
            wanted.extend(range(span.start + rows.start, span.start + rows.stop))
            if self._top and rows.stop < span.rows:
                asking.extend(range(span.start + rows.stop, span.start + span.rows))
            contexts.extend(contexts_of(span))
        dist, shown, tops = self._distributions(hidden, wanted + asking, contexts)
        outcomes, row = [], 0
        for span in spans:
            used = len(judged(span))
            outcomes.append(self._judge(span, dist, row, shown.part(row, row + used)))
            row += used
        if tops is None:
            self.drafter.learn(spans, hidden, outcomes)
        else:
            self.drafter.learn(spans, hidden, outcomes, tops)
        return outcomes

    def _distributions(
        self, hidden: Hidden, wanted: list[int], contexts: list[Context]
    ) -> tuple[Dist, Shown, Tensor | None]:
        """Computes what the verifier and the drafter are told of these rows, beside spans and outcomes. Rows beyond the
        contexts are the drafter's alone."""
        host = self.host
        if not wanted:
            nothing = torch.empty(0, self._top, dtype=torch.int64) if self._top else None
            return Dist([], host.model.config.vocab), Shown(), nothing
        host.counters.head_rows += len(wanted)
        x = hidden.rows(wanted)
        logits, tops = None, None
        if self._top or "logits" in self._wants:
            dist, logits, ids = distribution_shown(
                host.sample, host.model, x, contexts, "logits" in self._wants, self._top
            )
            tops = ids if self._top else None
        else:
            dist = distribution(host.sample, host.model, x, contexts)
        return dist, Shown(logits, x if "hidden" in self._wants else None), tops

    def _draw(self, span: Span, dist: Dist, row: int) -> Outcome:
        """The outcome of a span without guesses: what was certain, and one token drawn behind it."""
        certain = len(span.sure)
        u = 0.0 if dist.greedy(row) else _uniform(span.request, certain, Purpose.SAMPLE)
        token = dist.draw(row, u)
        if token == NOTHING:
            raise nothing_left(span.request, certain)
        return Outcome(span.rows, [*span.sure, token], certain, certain)

    def _judge(self, span: Span, dist: Dist, row: int, shown: Shown) -> Outcome:
        """The outcome of one span whose distributions start at `row`."""
        rows = len(judged(span))
        if not rows and span.note is None:
            return Outcome(span.rows, [])
        late = self.drafter.late(span.request) if self._late and rows and not span.sure else None
        if span.note is None and late is None:
            return self._draw(span, dist, row)
        rng = partial(_uniform, span.request)
        draft: Draft = Draft([], []) if span.note is None else span.note.cut(rows - 1)
        told: Sequence[Shown] = [shown] if self._wants else []
        if late is None:
            path, token = self.verifier(draft, dist.part(row, row + rows), rng, *told)
        else:
            path, token = self.verifier(_with(draft, late), dist.part(row, row + rows).longer(), rng)
            if len(draft.tokens) in path:  # what was drawn behind it means nothing
                path, token = path[:-1], late.tokens[0]
        if token == NOTHING:
            raise nothing_left(span.request, len(path))
        keep: int | list[int] = [0, *(node + 1 for node in path)]
        if keep == list(range(len(path) + 1)):
            keep = len(path) + 1
        tokens = [*(draft.tokens[node] for node in path), token]
        return Outcome(keep, tokens, drafted=len(draft.tokens), accepted=len(path))


def _uniform(request: Request, depth: int, purpose: int, index: int = 0) -> float:
    """A request's own number in [0, 1) for the token that is `depth` tokens ahead of its text."""
    return uniform(request.params.seed, request.known + depth, purpose, index)


def _with(draft: Draft, late: Draft) -> Draft:
    """A chain of drawn guesses with one more behind it."""
    assert late.q is not None and (draft.q is not None or not draft.tokens)
    q = late.q if draft.q is None else torch.cat((draft.q, late.q))
    return Draft.chain(draft.tokens + late.tokens, late.drawn, q)


def _name(method: Any) -> str:
    return str(type(method).__module__).rpartition(".")[2]
