"""How likely the model held a token: what a request may ask for beside its tokens."""

from __future__ import annotations

from typing import NamedTuple


class Score(NamedTuple):
    """Of a token after those before it, by the model's own distribution (the softmax of its logits in float32):
    no temperature, no penalty, no rule of the request or of a method has touched it."""

    logprob: float
    rank: int  # 1 = no token was likelier
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their log-probabilities, best first

    @classmethod
    def of(cls, plain: list[object]) -> Score:
        """From what JSON made of it."""
        logprob, rank, top = plain
        return cls(logprob, rank, tuple((token, value) for token, value in top))  # type: ignore[arg-type,attr-defined]
