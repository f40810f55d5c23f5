"""Reports the origin of each token of an answer (ORIGINS of request/score.py) to clients that ask with `"provenance":
true`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from phasewise.model.tokenizer import Detokenizer, Tokenizer
from phasewise.request.score import Score


class Origins:
    """Writes the entries of one choice: the text that a token completes, how it came about, and how likely the model
    held it by its own distribution. Their texts joined are the output as it was generated."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._text = Detokenizer(tokenizer, before=before)

    def tell(self, tokens: Sequence[int], scores: Sequence[Score | None], over: bool) -> list[dict[str, Any]]:
        """Writes the entries of the choice's next tokens. `over`: nothing follows, so half a character is not waited
        for."""
        entries = [self._entry(token, score) for token, score in zip(tokens, scores)]
        if over and entries:
            entries[-1]["token"] += self._text.flush()
        return entries

    def _entry(self, token: int, score: Score | None) -> dict[str, Any]:
        assert score is not None, "a token without a score, where provenance was asked for"
        text, probability = self._text.push([token]), round(math.exp(score.logprob), 6)
        return {"token": text, "origin": score.origin, "probability": probability}
