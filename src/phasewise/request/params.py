"""The parameters of a request: how tokens are drawn, when to stop, targets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from phasewise.errors import UserError

BACKGROUND = 1_000_000  # the priority of requests that run only while no others do


@dataclass(frozen=True, slots=True)
class Params:
    """The rules by which tokens are drawn and a request stops. `temperature=0` is greedy; neutral values switch a rule
    off.

    Raises UserError for a value that is out of range or no number.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()  # besides the model's end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # each token's log-probability, and as many of the likeliest; see request/score.py
    prompt_logprobs: int | None = None  # the same of the prompt's tokens ...
    scored_from: int = 1  # ... from this position on; before it, cached prefixes may be used
    ask: dict[str, Any] | None = None  # what a method is asked for, by the names it takes (`asks`); plain JSON
    provenance: bool = False  # how each token of the output came about, with its log-probability: `Score.origin`
    pooling: str | None = None  # "mean" or "last": a vector of the prompt's rows after the last layer (LLM.embed)
    min_tokens: int = 0  # until there are so many, no end token, stop token or stop string ends the output
    allowed_token_ids: tuple[int, ...] | None = None  # None = all
    bad_words: tuple[str | tuple[int, ...], ...] = ()  # never completed: texts, or sequences of token ids
    include_stop_str_in_output: bool = False  # the stop string, or the text of the token that ends, stays
    skip_special_tokens: bool = True  # False: they are part of the text
    truncate_prompt_tokens: int | None = None  # the prompt is cut to so many, its last ones
    # of those that wait, and of those that make way for others, the smaller goes first; BACKGROUND: see there
    priority: int = 0
    greedy: bool = field(init=False, repr=False)
    penalised: bool = field(init=False, repr=False)
    """Whether logits are changed by penalties, a bias or a rule. Both are asked of every request in every step."""
    ruled: bool = field(init=False, repr=False)  # whether some tokens are forbidden; then it is `penalised` too
    plain: bool = field(init=False, repr=False)  # each token is the one of the largest logit, with no rule beside
    scored: bool = field(init=False, repr=False)  # whether log-probabilities, or a vector, are asked for

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.pooling not in (None, "mean", "last"):
            raise UserError(f"pooling={self.pooling!r} must be 'mean' or 'last'")
        if not self.max_tokens and self.prompt_logprobs is None and self.pooling is None:
            raise UserError("max_tokens=0 is allowed only with prompt_logprobs or pooling: give at least 1")
        if not _all(Integral, self.stop_tokens):
            raise UserError(f"stop_tokens={self.stop_tokens!r} are no token ids: give whole numbers, as in (2, 7)")
        self._check_biases()
        self._check_rules()
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        if self.ask is not None:
            object.__setattr__(self, "ask", _plain(self.ask))
        object.__setattr__(self, "greedy", self.temperature == 0.0)
        ruled = self.min_tokens or self.allowed_token_ids is not None or self.bad_words
        object.__setattr__(self, "ruled", bool(ruled))
        object.__setattr__(self, "penalised", bool(penalties or self.logit_bias or ruled))
        object.__setattr__(self, "plain", self.greedy and not self.penalised and self.ask is None)
        told = (self.logprobs, self.prompt_logprobs, self.pooling)
        object.__setattr__(self, "scored", self.provenance or any(each is not None for each in told))

    def _check_ranges(self) -> None:
        for name, kind, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _all(kind, (value,)):
                raise UserError(f"{name}={value!r} is not a {'whole ' if kind is Integral else ''}number")
            if not low <= value <= high:
                raise UserError(f"{name}={value!r} is out of range: it must lie in [{low}, {high}]")

    def _check_biases(self) -> None:
        biases = self.logit_bias
        if not (isinstance(biases, Mapping) and _all(Integral, biases) and _all(Real, biases.values())):
            raise UserError(f"logit_bias={biases!r} does not give token ids a number each, as {{42: -5.0}} does")
        for token, bias in biases.items():
            if not -_BIAS <= bias <= _BIAS:
                raise UserError(f"logit_bias[{token}]={bias!r} is out of range: it must lie in [{-_BIAS}, {_BIAS}]")

    @property
    def background(self) -> bool:
        """True if it gives its slot, its memory and its part of each step to any request that is not."""
        return self.priority >= BACKGROUND

    @property
    def tells(self) -> bool:
        """True if every token of the output has a score."""
        return self.provenance or self.logprobs is not None

    def _check_rules(self) -> None:
        """Those on which tokens may be said, and where the output ends; sequences become tuples."""
        allowed, words = self.allowed_token_ids, self.bad_words
        if allowed is not None:
            if not (_all(Integral, allowed) and len(allowed)):
                raise UserError(f"allowed_token_ids={allowed!r} must be token ids, at least one: None allows all")
            object.__setattr__(self, "allowed_token_ids", tuple(allowed))
        if isinstance(words, str) or not _all(Collection, words) or not all(_word(word) for word in words):
            raise UserError(f"bad_words={words!r} must be a list of texts or of lists of token ids, none of them empty")
        settled = tuple(word if isinstance(word, str) else tuple(word) for word in words)
        object.__setattr__(self, "bad_words", settled)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        for name in ("include_stop_str_in_output", "skip_special_tokens", "provenance"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be True or False")


_BIAS = 1e4  # finite: infinities of either sign could leave no token, or two certain ones
_RANGES = (
    ("max_tokens", Integral, 0, 1 << 30),
    ("temperature", Real, 0.0, 100.0),
    ("top_k", Integral, 0, 1 << 30),
    ("top_p", Real, 1e-9, 1.0),
    ("min_p", Real, 0.0, 1.0),
    ("repetition_penalty", Real, 1e-3, 1e3),
    ("presence_penalty", Real, -10.0, 10.0),
    ("frequency_penalty", Real, -10.0, 10.0),
    ("seed", Integral, -math.inf, math.inf),
    ("logprobs", Integral, 0, 1 << 30),
    ("prompt_logprobs", Integral, 0, 1 << 30),
    ("scored_from", Integral, 1, 1 << 30),
    ("min_tokens", Integral, 0, 1 << 30),
    ("priority", Integral, -BACKGROUND, BACKGROUND),
    ("truncate_prompt_tokens", Integral, 1, 1 << 30),
)
_OPTIONAL = ("logprobs", "prompt_logprobs", "truncate_prompt_tokens")


def _word(word: object) -> bool:
    """True if it is a text or several token ids."""
    return bool(word) and not isinstance(word, bytes) and (isinstance(word, str) or _all(Integral, word))


def _plain(ask: object) -> dict[str, Any] | None:
    """Returns what JSON makes of it, so that it is the same wherever it travels; None if nothing is asked."""
    try:
        found = json.loads(json.dumps(ask, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"ask is no plain JSON ({error}): name texts, numbers, lists or dicts") from None
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError("ask has a lone surrogate, which is no character: decode bytes as what they are, or leave it "
                        "out") from None  # fmt: skip
    if not isinstance(found, dict):
        raise UserError(f"ask={ask!r:.60} does not name what is asked for, as {{'name': value}} does")
    return found or None


def _all(kind: type, given: object) -> bool:
    """True if these are several, and all of one kind."""
    return isinstance(given, Collection) and all(isinstance(each, kind) for each in given)


@dataclass(frozen=True, slots=True)
class SLO:
    """Targets of one request, seconds; None = no target.

    `ttft`: time to first token. `tpot`: mean time per output token after it. `tbt`: 99th percentile of the times
    between its tokens (P99 TBT, the target of arXiv 2403.02310).
    """

    ttft: float | None = None
    tpot: float | None = None
    tbt: float | None = None

    def __bool__(self) -> bool:
        """There is a target."""
        return any(target is not None for target in (self.ttft, self.tpot, self.tbt))

    def met(self, ttft: float, tpot: float | None, tbt: Callable[[], float | None]) -> bool:
        """Returns whether these latencies are within the targets. One that is None, for want of tokens, is. `tbt`
        gives the 99th percentile, and is asked only where there is a target for it."""
        for target, value in ((self.ttft, ttft), (self.tpot, tpot)):
            if target is not None and value is not None and value > target:
                return False
        return self.tbt is None or (found := tbt()) is None or found <= self.tbt
