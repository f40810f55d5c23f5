"""Reasoning ends after a given number of tokens: the tag that closes it is forced (budget forcing, s1, arXiv
2501.19393)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.methods.sample._reasoning import INSIDE, ReasoningTags, Thought
from phasewise.methods.sample._rest import Chained, both
from phasewise.methods.sample._rules import NEVER, goes_on
from phasewise.methods.sample._words import Words, words_of
from phasewise.request.drawer import Drawer
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, Dist
from phasewise.verbs.traits import Traits

NAME = "budget_forcing"
ASK = "thinking_budget"  # of `Params.ask`: {"open", "close": the tags, "opened": by the prompt, "tokens": the most}
MOST = 1 << 30
LATER = 3  # tokens that may come beyond the budget, to finish a character


@dataclass(frozen=True)
class BudgetForcing(Method):
    """Counts the tokens between the tags of reasoning. Once a request has as many as it asked for
    (`ask={"thinking_budget": {"open": "<think>", "close": "</think>", "opened": true, "tokens": 512}}`), nothing but
    the closing tag can be said, and then the answer follows. Requests that ask for none are left alone.

    A character that the budget would cut in two is finished first (at most three more tokens). Forced tokens are
    computed in one pass, as a grammar's are, and drafts follow the same rule. Left out of the paper: making a model
    reason for longer, and a text that is said before the tag.
    """

    then: Any = part("sample", "standard")

    paper: ClassVar[str] = "arXiv 2501.19393"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    @property
    def traits(self) -> Traits:
        then: Traits = self.then.traits
        return replace(then, asks=(ASK, *then.asks))

    def bind(self, host: Host) -> BudgetSampler:
        return BudgetSampler(host, self)


class Spent(NamedTuple):
    """Where a text is in its reasoning, and how many tokens of that it has."""

    thought: Thought
    tokens: int = 0


class ThinkingBudget:
    """What one request asks for, in the tokens of its model."""

    def __init__(self, asked: Mapping[str, Any], words: Words) -> None:
        self.tags, self.most = ReasoningTags(asked, words), int(asked["tokens"])

    def read(self, spent: Spent, tokens: Iterable[int]) -> Spent:
        """Returns where the text is after these tokens. A token that completes a tag is none of the reasoning."""
        for token in tokens:
            thought = self.tags.read(spent.thought, (token,))
            inside = spent.thought.phase == thought.phase == INSIDE
            spent = Spent(thought, spent.tokens + inside)
        return spent

    def forced(self, spent: Spent) -> int | None:
        """The token that has to come next; None where any may."""
        thought = spent.thought
        over = spent.tokens - self.most
        if thought.phase != INSIDE or over < 0 or (over < LATER and within_character(thought.tail)):
            return None
        return self.tags.closing(thought)

    def closing(self, spent: Spent) -> list[int]:
        """All tokens that have to come next, one after the other."""
        found = list[int]()
        while (token := self.forced(spent)) is not None:
            found.append(token)
            spent = self.read(spent, (token,))
        return found


def within_character(text: bytes) -> bool:
    """True if the text ends within a UTF-8 character that more bytes may complete."""
    for length in range(1, min(4, len(text) + 1)):
        if text[-length] < 0x80:
            return False
        if text[-length] >= 0xC0:  # where the last character begins
            try:
                text[-length:].decode()
            except UnicodeDecodeError as error:
                return error.reason == "unexpected end of data"
            return False
    return False


class BudgetDrawer(Drawer):
    """The reasoning of one request up to now; rolled forward, never counted anew."""

    def __init__(self, budget: ThinkingBudget, start: int) -> None:
        self.budget, self.upto = budget, start
        self.spent = Spent(budget.tags.start)

    def fork(self) -> BudgetDrawer:
        twin = BudgetDrawer(self.budget, self.upto)
        twin.spent = self.spent
        return twin

    def roll(self, request: Request) -> None:
        self.spent, self.upto = self.budget.read(self.spent, request.tokens[self.upto :]), request.known

    def forced(self, path: Sequence[int]) -> int | None:
        """The token that has to come after the text and `path`; None where any may."""
        return self.budget.forced(self.budget.read(self.spent, path))


class BudgetSampler(Chained):
    """Forbids everything but the closing tag where a budget is spent; the chain goes on with the rest."""

    def __init__(self, host: Host, knobs: BudgetForcing) -> None:
        super().__init__(host, knobs.then)
        self._model = host.model

    def check(self, params: Params) -> None:
        asked = (params.ask or {}).get(ASK)
        if asked is not None:
            self._closes(_asked(asked), params)
        super().check(params)

    def _closes(self, asked: Mapping[str, Any], params: Params) -> None:
        """Raise UserError where the closing tag cannot be said."""
        words = words_of(self._model)
        budget = ThinkingBudget({**asked, "opened": True, "tokens": 0}, words)
        needed = budget.closing(Spent(budget.tags.start))
        if b"".join([words.bytes[token] for token in needed]) != str(asked["close"]).encode():
            raise UserError(f"{ASK}: the vocabulary cannot spell {asked['close']!r}, which ends the reasoning")
        if params.allowed_token_ids is not None and not set(needed) <= set(params.allowed_token_ids):
            raise UserError(f"{ASK} has to say {asked['close']!r}, and allowed_token_ids lack its tokens: allow them")

    def among(self, contexts: Sequence[Context]) -> Sequence[Tensor | None]:
        forced = self._forced(contexts)
        if not forced:
            return self.then.among(contexts)
        words = words_of(self._model)
        own = [torch.from_numpy(words.mask([forced[row]])) if row in forced else None for row in range(len(contexts))]
        return [both(*pair) for pair in zip_longest(own, self.then.among(contexts))]

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        self._exclude(logits, contexts)
        return self.then(logits, contexts)

    def exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        self._exclude(logits, contexts)
        self.then.exclude(logits, contexts)

    def sure(self, request: Request) -> Sequence[int]:
        if not _asks(request.params):
            return self.then.sure(request)
        drawer, found = self._drawer(request), list[int]()
        for token in drawer.budget.closing(drawer.spent):
            if not goes_on(request.params, token):
                break
            found.append(token)
        return found

    def _exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        for row, token in self._forced(contexts).items():
            kept = logits[row, token].clone()
            logits[row] = NEVER
            logits[row, token] = kept

    def _forced(self, contexts: Sequence[Context]) -> dict[int, int]:
        """{row: the token that has to come there}, of rows at which a budget is spent."""
        found = {}
        for row, context in enumerate(contexts):
            if _asks(context.request.params):
                token = self._drawer(context.request).forced(context.path)
                if token is not None:
                    found[row] = token
        return found

    def _drawer(self, request: Request) -> BudgetDrawer:
        drawer: BudgetDrawer | None = request.state.get(NAME)
        if drawer is None:
            asked = (request.params.ask or {})[ASK]
            budget = ThinkingBudget(asked, words_of(self._model))
            drawer = request.state[NAME] = BudgetDrawer(budget, request.prompt_len)
        drawer.roll(request)
        return drawer


def _asks(params: Params) -> bool:
    return params.ask is not None and ASK in params.ask


def _asked(value: Any) -> Mapping[str, Any]:
    """Raises UserError for what is no budget."""
    match value:
        case {"open": str(open_), "close": str(close), "tokens": int(tokens)} if (
            open_ and close and 0 <= tokens <= MOST
        ):
            return dict(value)
    raise UserError(f"{ASK} must have open and close, the tags of reasoning, and tokens, a whole number of 0 to {MOST}")
