"""Texts in a grammar (Lark), where some words are special tokens of the vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class Spelling:
    """Texts in Lark, where some `words` are special tokens of the vocabulary, by their ids."""

    def __init__(self, words: Mapping[str, int]) -> None:
        self.words = words
        self._cut = re.compile("(" + "|".join(map(re.escape, words)) + ")") if words else None

    def __call__(self, text: str) -> str:
        parts = self._cut.split(text) if self._cut else [text]
        return " ".join(self.token(part) or quoted(part) for part in parts if part)

    def token(self, word: str) -> str:
        return f"<[{self.words[word]}]>" if word in self.words else ""

    def upto(self, rule: str, terminal: str, word: str) -> list[str]:
        """A rule for what a terminal allows up to the first `word`, be that a token or spelled out."""
        token = self.token(word)
        either = f" | {terminal} {token}" if token else ""
        return [f"{rule}_spelled[lazy]: {terminal} {quoted(word)}", f"{rule}: {rule}_spelled{either}"]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
