"""The interface of rows to the model under test, with its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.bench.quality import Generate, TextCodec
from phasewise.model.tokenizer import begun

Offer = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], list[int]]
"""The prompt for a conversation (messages) with tools."""
Losses = Callable[[list[int], Sequence[range]], list[float]]
"""Mean cross-entropy in nats of each stretch of a text (token ids), each token given all those before it."""
Follow = Callable[[Sequence[tuple[list[int], int]], int], list[list[int]]]
"""Texts (token ids), each written from a position on by a request whose prompt is what comes before, and then gone on
with by that request: greedy replies of at most so many tokens, without the end token."""


@dataclass(frozen=True)
class Subject:
    """A model that answers and can be made to write given text."""

    generate: Generate
    losses: Losses
    follow: Follow
    text: TextCodec
    context: int  # tokens
    chats: bool = True  # whether it has a chat template; if not, `text.chat` raises
    offer: Offer | None = None  # None: its template shows no tools

    def ask(self, question: str, answer: str) -> list[int]:
        """The prompt for a question; without a chat template it is a text that goes on with how an answer begins."""
        if self.chats:
            return self.text.chat([{"role": "user", "content": question}])
        return begun(self.text.encode(f"{question} {answer}"), self.text.begin)
