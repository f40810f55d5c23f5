"""Log-probabilities for the requests that ask: read off the rows that a step leaves behind, by the model's own head.

Tokens never depend on them: rows are scored after the verdict, in a pass of the head of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from phasewise.errors import NotFinite
from phasewise.request.pool import Pool
from phasewise.request.score import Score
from phasewise.step.phase import Hidden

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.step.span import Span
    from phasewise.verbs.decode import Outcome

LEAST = 1e-38  # a probability that has a logarithm
CELLS = 1 << 22  # logits at once: a prompt's are never held together


class _Asked(NamedTuple):
    """A token whose likelihood is wanted: the batch's row that it follows, its position, and how many others beside."""

    row: int
    position: int
    token: int
    top: int


def score(model: Model, counters: Counters, spans: Sequence[Span], outcomes: Sequence[Outcome], hidden: Hidden) -> None:
    """Fill in the scores of these outcomes, where their requests ask."""
    rows, asked = [hidden.x], list[list[_Asked]]()
    for span, outcome in zip(spans, outcomes):
        asked.append(_asked(span, outcome, sum(map(len, rows))))
        if outcome.said_by is not None:
            rows.append(outcome.said_by)
    every = hidden if len(rows) == 1 else Hidden(torch.cat(rows), sum(map(len, rows)))
    found = iter(_scores(model, every, [one for each in asked for one in each]))
    for outcome, each in zip(outcomes, asked):
        outcome.scores = {one.position: next(found) for one in each}
        counters.head_rows += len(each)
    for span, outcome in zip(spans, outcomes):
        if span.request.params.provenance:
            outcome.scores = {**outcome.scores, **_told(span, outcome)}
    for span, outcome in zip(spans, outcomes):
        request = span.request
        if request.params.pooling is not None and request.prefilling and request.parent is None:
            outcome.pool = _pool(model, span, hidden)


def _asked(span: Span, outcome: Outcome, behind: int) -> list[_Asked]:
    """`behind`: where the rows of `Outcome.said_by` begin."""
    request, params = span.request, span.request.params
    found: list[_Asked] = []
    if params.prompt_logprobs is not None and request.prefilling and request.parent is None:  # siblings take theirs
        for row, before in enumerate(span.positions):
            at = before + 1
            if params.scored_from <= at < request.prompt_len and at not in request.scores:
                found.append(_Asked(span.start + row, at, request.tokens[at], params.prompt_logprobs))
    if params.tells and not outcome.origin:
        for i, (row, token) in enumerate(zip(_saying(span, outcome, behind), outcome.tokens)):
            found.append(_Asked(row, request.known + i, token, params.logprobs or 0))
    return found


def _saying(span: Span, outcome: Outcome, behind: int) -> list[int]:
    """The rows that an outcome's tokens come after: the last ones kept, one for each token (`Decode.scattered`), but
    for those of `Outcome.said_by`, which begin at `behind`."""
    more = 0 if outcome.said_by is None else len(outcome.said_by)
    count = len(outcome.tokens) - more
    kept = range(outcome.keep) if isinstance(outcome.keep, int) else outcome.keep
    rows = kept[len(kept) - count :] if count else ()
    assert len(rows) == count, "a token for which no row was kept"
    return [*(span.start + row for row in rows), *range(behind, behind + more)]


def _told(span: Span, outcome: Outcome) -> dict[int, Score]:
    """The scores of the output's tokens, with how each came about."""
    known, found = span.request.known, {}
    for i in range(len(outcome.tokens)):
        at = known + i
        score = outcome.scores.get(at) or Score(math.log(max(outcome.odds[i], LEAST)), 0)
        found[at] = score._replace(origin=_origin(span, outcome, i))
    return found


def _origin(span: Span, outcome: Outcome, i: int) -> str:
    """Returns the origin of the output token of this index."""
    if outcome.origin:
        return outcome.origin
    if span.request.prefilling and span.request.known + i == span.request.prompt_len:
        return "prefill"
    if i < outcome.accepted:
        return "forced" if span.sure else "accepted"
    return "decode"


def _pool(model: Model, span: Span, hidden: Hidden) -> Pool | None:
    """Returns the pool of the request's rows with those of this span added, each of which counts once."""
    request, before = span.request, span.request.pool
    upto = 0 if before is None else before.upto
    rows = [span.start + i for i, at in enumerate(span.positions) if upto <= at < request.prompt_len]
    if not rows:
        return before
    upto += len(rows)
    if request.params.pooling == "last":
        rows = rows[-1:]
    own = model.norm(hidden.rows(rows)).float().sum(0)  # [d]
    if not bool(torch.isfinite(own).all()):
        raise NotFinite("a vector is not finite")
    return Pool(upto, own if before is None or request.params.pooling == "last" else before.total + own)


def _scores(model: Model, hidden: Hidden, asked: Sequence[_Asked]) -> list[Score]:
    out: list[Score] = []
    most = max(1, CELLS // model.config.vocab)
    for start in range(0, len(asked), most):
        some = asked[start : start + most]
        logits = model.head(hidden.rows([one.row for one in some]))  # float32 [n, V]
        tokens = torch.tensor([one.token for one in some], device=logits.device)[:, None]
        total = logits.logsumexp(-1, keepdim=True)
        if not bool(torch.isfinite(total).all()):
            raise NotFinite("log-probabilities are not finite")
        own = logits.gather(1, tokens)
        ranks = (logits > own).sum(-1) + 1
        top = logits.topk(min(max(one.top for one in some), logits.shape[-1]), -1)
        values, ids = (top.values - total).tolist(), top.indices.tolist()
        for i, (logprob, rank) in enumerate(zip((own - total)[:, 0].tolist(), ranks.tolist())):
            out.append(Score(logprob, rank, tuple(zip(ids[i], values[i]))[: some[i].top]))
    return out
