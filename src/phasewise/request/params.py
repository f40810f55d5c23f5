"""What a caller may ask of a request: how tokens are drawn, when to stop, targets."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from phasewise.errors import UserError


@dataclass(frozen=True, slots=True)
class Params:
    """How tokens are drawn and when to stop. `temperature=0` is greedy; neutral values switch a rule off.

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
    greedy: bool = field(init=False, repr=False)
    penalised: bool = field(init=False, repr=False)
    """Whether logits are changed by penalties or a bias. Both are asked of every request in every step."""
    scored: bool = field(init=False, repr=False)  # whether log-probabilities are asked for

    def __post_init__(self) -> None:
        for name, kind, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _all(kind, (value,)):
                raise UserError(f"{name}={value!r} is not a {'whole ' if kind is Integral else ''}number")
            if not low <= value <= high:
                raise UserError(f"{name}={value!r} is out of range: it must lie in [{low}, {high}]")
        if not self.max_tokens and self.prompt_logprobs is None:
            raise UserError("max_tokens=0 asks for nothing: it is for prompt_logprobs alone; give at least 1")
        if not _all(Integral, self.stop_tokens):
            raise UserError(f"stop_tokens={self.stop_tokens!r} are no token ids: give whole numbers, as in (2, 7)")
        biases = self.logit_bias
        if not (isinstance(biases, Mapping) and _all(Integral, biases) and _all(Real, biases.values())):
            raise UserError(f"logit_bias={biases!r} does not give token ids a number each, as {{42: -5.0}} does")
        for token, bias in biases.items():
            if not -_BIAS <= bias <= _BIAS:
                raise UserError(f"logit_bias[{token}]={bias!r} is out of range: it must lie in [{-_BIAS}, {_BIAS}]")
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        if self.ask is not None:
            object.__setattr__(self, "ask", _plain(self.ask))
        object.__setattr__(self, "greedy", self.temperature == 0.0)
        object.__setattr__(self, "penalised", bool(penalties or self.logit_bias))
        object.__setattr__(self, "scored", self.logprobs is not None or self.prompt_logprobs is not None)


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
)
_OPTIONAL = ("logprobs", "prompt_logprobs")


def _plain(ask: object) -> dict[str, Any] | None:
    """What JSON makes of it, so that it is the same wherever it travels; None if nothing is asked."""
    try:
        found = json.loads(json.dumps(ask, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"ask is no plain JSON ({error}): name texts, numbers, lists or dicts") from None
    if not isinstance(found, dict):
        raise UserError(f"ask={ask!r:.60} does not name what is asked for, as {{'name': value}} does")
    return found or None


def _all(kind: type, given: object) -> bool:
    """Whether these are several, and all of one kind."""
    return isinstance(given, Collection) and all(isinstance(each, kind) for each in given)


@dataclass(frozen=True, slots=True)
class SLO:
    """Targets of one request, seconds; None = no target."""

    ttft: float | None = None
    tpot: float | None = None
