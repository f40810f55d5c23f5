"""Log-probabilities in the shapes that OpenAI's clients know: of chats, and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.model.tokenizer import Detokenizer, Tokenizer
from phasewise.request.score import Score

LEAST = -9999.0  # stands for what JSON has no number for


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its score; None: nothing is before it. `offset`: where its text begins, in characters."""

    token: int
    offset: int
    score: Score | None


class LogprobFormatter:
    """Writes the scores of one choice's tokens. `top`: of how many others; `before`: tokens whose text the choice's
    goes on with, and which are not told of."""

    def __init__(self, tokenizer: Tokenizer, top: int, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._text, self._offset = Detokenizer(tokenizer, before=before), 0

    def tell(self, tokens: Sequence[int], scores: Sequence[Score | None]) -> list[TokenScore]:
        """Writes the scores of the choice's next tokens."""
        told = []
        for token, score in zip(tokens, scores):
            new, own = self._text.push([token]), spelled(self._tokenizer, token)
            at = self._offset + (len(new) - len(own) if own and new.endswith(own) else 0)  # behind what was held back
            told.append(TokenScore(token, at, score))
            self._offset += len(new)
        return told

    # ---- shapes
    def chat(self, told: Sequence[TokenScore]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat."""
        content = []
        for one in told:
            assert one.score is not None
            entry = self._entry(one.token, one.score.logprob)
            content.append(entry | {"top_logprobs": [self._entry(*each) for each in one.score.top[: self._top]]})
        return {"content": content, "refusal": None}

    def completion(self, told: Sequence[TokenScore]) -> dict[str, Any]:
        """`choices[].logprobs` of a completion: of tokens that are written alike, the likeliest is told; the token
        itself is always among them."""
        return {
            "tokens": [self._written(one.token) for one in told],
            "token_logprobs": [None if one.score is None else finite(one.score.logprob) for one in told],
            "top_logprobs": [None if one.score is None else self._top_of(one.token, one.score) for one in told],
            "text_offset": [one.offset for one in told],
        }

    def _top_of(self, token: int, score: Score) -> dict[str, float]:
        found: dict[str, float] = {}
        for other, value in (*score.top[: self._top], (token, score.logprob)):
            found.setdefault(self._written(other), finite(value))
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.raw(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}

    def _written(self, token: int) -> str:
        return spelled(self._tokenizer, token)


def by_id(tokenizer: Tokenizer, token: int, score: Score, top: int) -> dict[str, dict[str, Any]]:
    """An entry of `prompt_logprobs`: the likeliest and the token itself, by id."""
    ranked = [(other, value, rank) for rank, (other, value) in enumerate(score.top[:top], 1) if other != token]
    return {
        str(other): {"logprob": finite(value), "rank": rank, "decoded_token": spelled(tokenizer, other)}
        for other, value, rank in [(token, score.logprob, score.rank), *ranked]
    }


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return logprob if logprob > LEAST else LEAST


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; of incomplete characters U+FFFD."""
    return tokenizer.raw(token).decode("utf-8", "replace")
