"""The log-probability of a token, which a request may ask for beside its tokens."""

from __future__ import annotations

from typing import NamedTuple

ORIGINS = {  # of a token of the output
    "prefill": "drawn after the prompt's last row",
    "decode": "drawn after the token before it, in a step of its own or behind guesses that were right",
    "accepted": "guessed by a drafter, and kept by the verifier",
    "forced": "the only token that was left to say, computed along with the one before it",
    "denoised": "a mask that became final in a step of diffusion",
}


class Score(NamedTuple):
    """The score of a token after those before it, by the model's own distribution (the softmax of its logits in
    float32): no temperature, no penalty, no rule of the request or of a method has touched it."""

    logprob: float
    rank: int  # 1 = no token was likelier; 0 = nobody has looked
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their log-probabilities, best first
    origin: str = ""  # how it came about, where `Params.provenance` asks: one of ORIGINS

    @classmethod
    def of(cls, plain: list[object]) -> Score:
        """From what JSON made of it."""
        logprob, rank, top, origin = plain
        return cls(logprob, rank, tuple((token, value) for token, value in top), origin)  # type: ignore[arg-type,attr-defined]
