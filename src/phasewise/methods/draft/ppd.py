"""Trained embeddings behind every token stand for the next ones, and guess them in the verify pass itself (parallel
prompt decoding, PPD, arXiv 2405.18628): exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.last_state import RankPath
from phasewise.speculation.heads.ppd_layout import prompt_tokens
from phasewise.speculation.prompt_trees import Accuracy, prompt_trees
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "ppd"
DEEPEST = 8  # guesses in a row
MOST = 127  # rows of a pass, beside the pending token's


@dataclass(frozen=True)
class PPD(Method):
    """A tree of guesses at most `depth` deep, and prompt tokens behind them: at most `rows` of both.

    A prompt token is a trained embedding. Some stand behind the pending token and behind each guess, at the positions
    of the tokens to come. Such a row sees what its token sees, its token, and the prompt tokens before it there; no
    real row sees any, and none stays in the KV. What the model says after those of the last accepted token is what the
    next pass guesses.

    A guess has as many prompt tokens as pay for their rows, and the next draft is as deep as the last accepted token
    has prompt tokens. There is a tree for each such depth. The trees follow from how often each rank of each depth was
    right on held-out text: of a guess that is unlikely to be accepted last, prompt tokens are left out.

    All rows run all layers, in one pass. A pass after a prompt, or after rows were computed anew, has nothing to guess
    by: it has the pending token's prompt tokens alone.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder of `phasewise train heads
    ppd`; or `random:SEED`. Guesses are chosen, not drawn. Left out: several embeddings for a prompt token, whose logits
    are averaged; prompt tokens behind a prompt's last slice; `rows` chosen by what passes take on the machine.
    """

    heads: str = AUTO
    rows: int = 63
    depth: int = 3

    paper: ClassVar[str] = "arXiv 2405.18628"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"rows": 11, "depth": 2}

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= DEEPEST:
            raise UserError(f"{NAME}: depth={self.depth} must be from 1 to {DEEPEST}")
        if not self.depth < self.rows <= MOST:
            raise UserError(f"{NAME}: rows={self.rows} must be from {self.depth + 1}, a guess and {self.depth} prompt "
                            f"tokens, to {MOST}")  # fmt: skip

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.rows)

    def bind(self, host: Host) -> PromptDrafter:
        prompts, accuracy = prompt_tokens(host.model, self.heads)
        return PromptDrafter(host, prompts().detach(), tuple(map(tuple, accuracy)), self)


@dataclass(frozen=True)
class _Plan:
    """The guesses of one draft, and the prompt tokens behind the pending token and behind each of them."""

    paths: Sequence[RankPath]
    prompts: Sequence[int]

    @property
    def rows(self) -> int:
        return len(self.paths) + sum(self.prompts)


class PromptDrafter(Drafter):
    """PPD in one engine. Of a request it keeps the last layer's rows of the prompt tokens behind the token before the
    pending one, as `request.state` has it: the number of tokens for which they hold, and the rows [prompts, d]."""

    def __init__(self, host: Host, prompts: Tensor, accuracy: Accuracy, knobs: PPD) -> None:
        """prompts [prompts, d]: the rows of all prompt tokens."""
        self.model, self.counters = host.model, host.counters
        self.depth = min(knobs.depth, len(prompts))
        self.prompts = prompts[: self.depth].to(host.model.device, host.model.dtype)
        self.accuracy = accuracy[: self.depth]
        self.trees = prompt_trees(self.accuracy, knobs.rows)

    # ---- how large
    def size(self, request: Request) -> int:
        return next(self._plans(request)).rows

    def reach(self, context: int) -> int:
        return ENDLESS

    def _plans(self, request: Request) -> Iterator[_Plan]:
        """What may be asked of the model next, the largest first: with one guess fewer each time, then with one prompt
        token fewer. The next draft needs no guess beyond the text's end, and no prompt token for one."""
        tree, levels = self.trees[len(self._known(request))], headroom(request)
        paths = [path for path in tree.paths if len(path) <= levels]
        prompts = [max(0, min(tree.prompts[path], levels - len(path) - 1)) for path in ((), *paths)]
        for guesses in range(len(paths), 0, -1):
            yield _Plan(paths[:guesses], prompts[: guesses + 1])
        for own in range(prompts[0], -1, -1):
            yield _Plan((), (own,))

    def _known(self, request: Request) -> Tensor:
        """The rows by which a request is guessed for, [at most depth, d]."""
        known, rows = request.state.get(NAME, (-1, None))
        return self.prompts[:0] if known != request.known or rows is None else rows

    # ---- drafts
    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        plans = [next(plan for plan in self._plans(request) if plan.rows <= max(0, budget))
                 for request, budget in zip(requests, budgets)]  # fmt: skip
        asked = [(request, plan.paths) for request, plan in zip(requests, plans) if plan.paths]
        ids = iter(self.ranked(asked) if asked else ())
        return [self._made(plan, next(ids) if plan.paths else ()) for plan in plans]

    def ranked(self, asked: Sequence[tuple[Request, Sequence[RankPath]]]) -> list[list[list[int]]]:
        """The likeliest tokens of each depth, best first, of all requests for which there are guesses to make."""
        depths = [max(map(len, paths)) for _, paths in asked]
        rows = torch.cat([self._known(request)[:depth] for (request, _), depth in zip(asked, depths)])
        width = 1 + max(rank for _, paths in asked for path in paths for rank in path)
        self.counters.head_rows += len(rows)
        ids = iter(self.model.head(rows).topk(min(width, self.model.config.vocab), -1).indices.tolist())
        return [[next(ids) for _ in range(depth)] for depth in depths]

    def _made(self, plan: _Plan, ids: Sequence[Sequence[int]]) -> Draft | None:
        """The guesses of a plan, then the prompt tokens."""
        draft = Draft([], [])
        nodes: dict[RankPath, int] = {(): -1}
        for path in plan.paths:
            nodes[path] = draft.add(nodes[path[:-1]], ids[len(path) - 1][path[-1]])
        for above, count in zip(nodes.values(), plan.prompts):
            for _ in range(count):
                above = draft.add(above, 0)  # no token: its row is given
                draft.ask += 1
        if draft.ask:
            which = [*chain.from_iterable(range(count) for count in plan.prompts)]
            draft.given = self.prompts[torch.tensor(which, device=self.prompts.device)]
        return draft if draft.tokens else None

    # ---- what the pass says
    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for span, outcome in zip(spans, outcomes):
            if span.note is None or span.note.given is None:
                continue  # none of its rows is a prompt token's
            last = outcome.keep - 1 if isinstance(outcome.keep, int) else outcome.keep[-1]
            nodes, first = span.note.asking(last - 1), span.start + 1
            said = hidden.x[first + nodes.start : first + nodes.stop].clone()
            span.request.state[NAME] = (span.request.known + len(outcome.tokens), said)
