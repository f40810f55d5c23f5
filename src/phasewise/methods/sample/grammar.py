"""Only what a grammar allows: JSON Schema, regular expressions, Lark or GBNF, choices, as each request asks
(llguidance; JSONSchemaBench, arXiv 2501.10868)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from phasewise.catalog import part
from phasewise.errors import Unanswerable, UserError
from phasewise.methods.sample._grammars import AROUND, KINDS, REASONING, Compiled, Grammars, grammars_of, reason
from phasewise.methods.sample._reasoning import ReasoningTags
from phasewise.methods.sample._rest import Chained, both
from phasewise.methods.sample._rules import goes_on
from phasewise.methods.sample._words import Bits, Words, has, words_of
from phasewise.ops.sampling import barred
from phasewise.request.drawer import Drawer
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.companion import common
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, Dist
from phasewise.verbs.traits import Traits

log = logging.getLogger(__name__)
NAME = "grammar"
FOREIGN = "doesn't satisfy the grammar"  # what llguidance says of a token that no mask has allowed
Path = tuple[int, ...]


@dataclass(frozen=True)
class Grammar(Method):
    """Tokens that the grammar of a request (`ask={"json_schema": {...}}`, or `regex`, `choice`, `grammar`) forbids have
    no chance: what is drawn, and what is accepted of a draft, always goes on to a text of the grammar. End tokens are
    allowed where the text may end, and only there. Requests that ask for none are left alone.

    Masks come from llguidance and from the model's own vocabulary, byte for byte; a draft's rows each follow their own
    path. Which keywords are honoured, and what bounds there are, is in docs/structured.md.
    """

    then: Any = part("sample", "standard")

    paper: ClassVar[str] = "arXiv 2501.10868"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    @property
    def traits(self) -> Traits:
        then: Traits = self.then.traits
        return replace(then, asks=(*KINDS, AROUND, REASONING, *then.asks))

    def bind(self, host: Host) -> _Grammar:
        return _Grammar(host, self)


class GrammarState(Drawer):
    """The state of one request in its grammar, and the masks that hold there and below."""

    def __init__(
        self, compiled: Compiled, words: Words, start: int, tags: ReasoningTags | None = None, begins: bool = True
    ) -> None:
        self.words, self.upto = words, start
        self.first = start
        self._strips = words.strips if begins else None
        self._tags = tags
        self._thought = None if tags is None else tags.start
        self.masks: dict[Path, Bits | None] = {}
        self.added: dict[Path, Tensor | None] = {}
        self._sure: Path | None = None
        self._matcher = compiled.start()
        self._below: Path = ()  # what the matcher has read beyond the request's tokens

    def fork(self) -> GrammarState:
        self._back(0)
        twin = object.__new__(GrammarState)
        twin.words, twin.upto, twin.first, twin._below = self.words, self.upto, self.first, ()
        twin.masks, twin.added, twin._sure, twin._matcher = {}, {}, None, self._matcher.deep_copy()
        twin._tags, twin._thought, twin._strips = self._tags, self._thought, self._strips
        return twin

    def roll(self, request: Request) -> None:
        """Read what the request has said since. Raises RuntimeError where the grammar has not allowed that."""
        new = request.tokens[self.upto :]
        if not new:
            return
        if self._tags is not None and self._thought is not None:
            self._thought = self._tags.read(self._thought, new)
        read = common(self._below, new)
        self._back(read)
        self.masks.clear()
        self.added.clear()
        self._below, self._sure, self.upto = (), None, request.known
        if read < len(new) and not self._matcher.consume_tokens(new[read:]):
            error = self._matcher.get_error()
            if FOREIGN in error:
                raise RuntimeError(f"the grammar does not go on: {error}")
            raise Unanswerable(f"the grammar has become too complex: {reason(error)}")

    def sure(self, params: Params) -> Path:
        """Tokens that follow the text whatever the model says, up to one that ends it or is not allowed besides."""
        if self._sure is None:
            self._back(0)
            ends = self.words.ends
            found = self._matcher.compute_ff_tokens()
            if found and self._begins(()) and self._strips is not None and has(self._strips, found[0]):
                found = []  # the text begins with another token than the usual one: the mask tells which
            self._sure = tuple(takewhile(lambda token: token not in ends and goes_on(params, token), found))
        return self._sure

    def closing(self, path: Path) -> int | None:
        """The token that goes on to the end of the reasoning in which the text and `path` are; None outside of it."""
        if self._tags is None or self._thought is None:
            return None
        return self._tags.closing(self._tags.read(self._thought, path))

    def certain(self, path: Path, params: Params) -> bool:
        """True if the text goes on with that for certain."""
        return not path or path == self.sure(params)[: len(path)]

    def mask(self, path: Path, stops: Sequence[int]) -> Bits | None:
        """The tokens that may follow the text and `path`; None where the path leaves the grammar, or has ended.
        `stops`: tokens that end this text too."""
        if path not in self.masks:
            self.masks[path] = self._mask(stops, first=self._begins(path)) if self._go(path) else None
        return self.masks[path]

    def counts(self, path: Path, stops: Sequence[int]) -> Tensor | None:
        """A mask as int32 [V / 32]. Raises Unanswerable where it forbids all."""
        mask = self.mask(path, stops)
        if mask is not None and not mask.any():
            after = self.upto - self.first + len(path)
            raise Unanswerable(f"the grammar leaves no token after {after} tokens: the vocabulary lacks it")
        return None if mask is None else torch.from_numpy(mask)

    def add(self, path: Path, stops: Sequence[int]) -> Tensor | None:
        """A mask as what is added to logits, float32 [V]: 0, or -inf. Raises Unanswerable where it forbids all."""
        if path not in self.added:
            counts = self.counts(path, stops)
            self.added[path] = None if counts is None else barred(counts, self.words.vocab)
        return self.added[path]

    def _mask(self, stops: Sequence[int], first: bool) -> Bits:
        mask: Bits = np.zeros(self.words.width, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() and "NoExtension" in self._matcher.get_error():
            mask[:] = 0
        elif self._matcher.is_error():
            raise Unanswerable(f"the grammar has become too complex: {reason(self._matcher.get_error())}")
        if stops and self._matcher.is_accepting():
            mask |= self.words.mask(stops)
        if first and self._strips is not None:
            left = mask & ~self._strips
            # of a text that is certain, the matcher allows the usual spelling alone, which may begin with such a token
            mask = left if left.any() else self._shorter() & ~self._strips
        return mask

    def _shorter(self) -> Bits:
        """Every token that the certain text begins with, as bits."""
        return self.words.mask(self.words.speller.beginnings(self._matcher.compute_ff_bytes()))

    def _begins(self, path: Path) -> bool:
        """True if the token after `path` is the first of the text."""
        return not path and self.upto == self.first

    def _go(self, path: Path) -> bool:
        """Move to below the text, as far as that is in the grammar. -> whether all of it is"""
        here = self._below
        if here == path:
            return True
        if any(token in self.words.ends for token in path):
            return False
        same = common(here, path)
        self._back(same)
        read = self._matcher.try_consume_tokens(list(path[same:])) if same < len(path) else 0
        self._below = path[: same + read]
        return same + read == len(path)

    def _back(self, kept: int) -> None:
        """Move to below the first `kept` tokens of what was read beyond the text."""
        if kept < len(self._below):
            self._matcher.rollback(len(self._below) - kept)
            self._below = self._below[:kept]


How = Callable[[GrammarState, Path, Sequence[int]], Tensor | None]


class _Grammar(Chained):
    def __init__(self, host: Host, knobs: Grammar) -> None:
        super().__init__(host, knobs.then)
        self.model = host.model
        self._grammars: Grammars | None = None
        self._beside: Future[None] | None = None  # masks that are filled beside the forward
        self._pool: ThreadPoolExecutor | None = None

    # ---- before admission
    def check(self, params: Params) -> None:
        if _asked(params):
            if params.ignore_eos:
                raise UserError("ignore_eos cannot go with a grammar, whose texts have an end: leave one of them out")
            self._begins(self._compiled(params), params)
        super().check(params)

    def _begins(self, compiled: Compiled, params: Params) -> None:
        """Raise UserError where no text can begin with any token that the request allows."""
        if params.allowed_token_ids is None:
            return
        assert self._grammars is not None
        words = self._grammars.words
        mask = GrammarState(compiled, words, 0, begins=False).mask((), _stops(params, words))
        if mask is None or not (mask & words.mask([i for i in params.allowed_token_ids if i < words.vocab])).any():
            kind = next(kind for kind in KINDS if kind in (params.ask or {}))
            raise UserError(f"{kind} and allowed_token_ids leave no token to begin with: allow more")

    def _compiled(self, params: Params) -> Compiled:
        if self._grammars is None:
            self._grammars = grammars_of(words_of(self.model))
        return self._grammars.get(params.ask or {})

    # ---- every step
    def among(self, contexts: Sequence[Context]) -> Sequence[Tensor | None]:
        self._wait()
        asked = [_asked(context.request.params) for context in contexts]
        if not any(asked):
            return self.then.among(contexts)
        masks = [self._of(GrammarState.counts, context) if mine else None for mine, context in zip(asked, contexts)]
        return [both(*pair) for pair in zip_longest(masks, self.then.among(contexts))]

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        self._exclude(logits, contexts)
        return self.then(logits, contexts)

    def greedy(self, contexts: Sequence[Context]) -> bool:
        return self.then.greedy(contexts) and all(self._closing(context) is None for context in contexts)

    def _closing(self, context: Context) -> int | None:
        """The token that takes the place of an end token within reasoning, after which an answer has to come."""
        params = context.request.params
        if not _asked(params) or REASONING not in (params.ask or {}):
            return None
        self._wait()
        return self._line(context.request).closing(context.path)

    def ahead(self, contexts: Sequence[Context]) -> None:
        """Masks are filled in a thread while the model computes."""
        self._wait()
        self._pool = self._pool or ThreadPoolExecutor(1, "masks")
        how = GrammarState.counts if self.greedy(contexts) else GrammarState.add
        self._beside = self._pool.submit(self._fill, how, [c for c in contexts if _asked(c.request.params)])
        self.then.ahead(contexts)

    def _fill(self, how: How, contexts: Sequence[Context]) -> None:
        for context in contexts:
            try:
                self._of(how, context)
            except (RuntimeError, UserError):
                log.debug("the mask of %s is left for later, when the request fails", context.request)

    def _wait(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.result()

    def sure(self, request: Request) -> Sequence[int]:
        if not _asked(request.params):
            return self.then.sure(request)
        self._wait()
        return self._line(request).sure(request.params) or self.then.sure(request)

    def exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        self._exclude(logits, contexts)
        self.then.exclude(logits, contexts)

    def _exclude(self, logits: Tensor, contexts: Sequence[Context]) -> None:
        """Logits [n, V] of what a grammar forbids become -inf."""
        self._wait()
        for row, context in enumerate(contexts):
            if _asked(context.request.params):
                added = self._of(GrammarState.add, context)
                if added is not None:
                    closing = self._closing(context)
                    if closing is not None:
                        self._close(logits[row], closing)
                    logits[row] += added.to(logits.device)

    def _close(self, logits: Tensor, closing: int) -> None:
        """A model that would end its answer within reasoning ends the reasoning: logits [V], in place."""
        assert self._grammars is not None
        ends = [token for token in self._grammars.words.ends if token < len(logits)]
        logits[closing] = torch.maximum(logits[closing], logits[ends].max())

    def _of(self, how: How, context: Context) -> Tensor | None:
        """The mask of a row, as its line has it. Raises Unanswerable where the text cannot go on."""
        request = context.request
        line = self._line(request)
        certain = line.certain(context.path, request.params)
        try:
            return how(line, context.path, _stops(request.params, line.words))
        except Unanswerable:
            request.state.pop(NAME, None)  # read anew, should it be asked for again
            if certain:
                raise
            return None  # nobody gets there unless a draft is right; then the text has come to its end

    def _line(self, request: Request) -> GrammarState:
        line: GrammarState | None = request.state.get(NAME)
        if line is None:
            compiled = self._compiled(request.params)
            assert self._grammars is not None
            words, asked = self._grammars.words, (request.params.ask or {}).get(REASONING)
            tags = None if asked is None else ReasoningTags(asked, words)
            begins = all(token in words.special for token in request.tokens[: request.prompt_len])  # nothing was said
            line = request.state[NAME] = GrammarState(compiled, words, request.prompt_len, tags, begins)
        line.roll(request)
        return line


def _asked(params: Params) -> bool:
    return params.ask is not None and not params.ask.keys().isdisjoint(KINDS)


def _stops(params: Params, words: Words) -> list[int]:
    """Tokens besides the end tokens that end this text and are none of it."""
    return [token for token in params.stop_tokens if token in words.special and token < words.vocab]
