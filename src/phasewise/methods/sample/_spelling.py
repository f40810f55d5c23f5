"""Texts as tokens, byte for byte: what a grammar forces is said by tokens that join to exactly that text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from phasewise.model.tokenizer import Tokenizer

UNCHANGED: Any = {"normalizer": None, "post_processor": None, "truncation": None, "padding": None, "added_tokens": []}


class Speller:
    """Spells texts with the tokens of a vocabulary that are not `special`, of which `texts` are the bytes.

    The tokenizer's own merges decide, without what changes a text before them: its normalizer, a space that it puts in
    front, added tokens that take the blanks beside them. Where its tokens still join to another text, the fewest that
    join to this one are taken.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[bytes], special: Collection[int]) -> None:
        self._texts, self._special = texts, special
        self._spaces = {space: entry for entry, space in tokenizer.bytes_of.spaces.items()}
        self._entries = frozenset(tokenizer.bytes_of.spaces)
        self._merges = _merges(tokenizer.backend)
        self._ids: dict[bytes, int] = {}
        for i, text in enumerate(texts):
            if text and i not in special:
                self._ids.setdefault(text, i)
        self._lengths = sorted({len(text) for text in self._ids}, reverse=True)
        added = tokenizer.backend.get_added_tokens_decoder()
        self._added = {
            token.content: i
            for i, token in added.items()
            if not token.single_word and self._is_text(i, token.content, special)
        }
        longest_first = sorted(self._added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def __call__(self, text: bytes) -> list[int]:
        """Token ids whose bytes join to the text; to as much of its beginning as the vocabulary has, where it cannot be
        spelled."""
        own = self._own(text)
        return self._fewest(text) if own is None else own

    def beginnings(self, text: bytes) -> list[int]:
        """Token ids of which the bytes begin the text, one for each length."""
        beginnings = (text[:length] for length in self._lengths if length <= len(text))
        return [self._ids[beginning] for beginning in beginnings if beginning in self._ids]

    def _is_text(self, i: int, content: str, special: Collection[int]) -> bool:
        return i not in special and i < len(self._texts) and bool(content) and self._texts[i] == content.encode()

    def _own(self, text: bytes) -> list[int] | None:
        """Returns the text as the tokenizer spells it; None where that is another text."""
        try:
            said = text.decode()
        except UnicodeDecodeError:
            return None
        if any(entry in said for entry in self._entries):
            return None  # it reads like a space in the vocabulary
        ids = list[int]()
        for part in self._cut.split(said) if self._cut else [said]:
            ids += [self._added[part]] if part in self._added else self._merged(part)
        text_alone = all(i < len(self._texts) and i not in self._special for i in ids)
        right = text_alone and b"".join([self._texts[i] for i in ids]) == text
        return ids if right else None

    def _merged(self, text: str) -> list[int]:
        for space, entry in self._spaces.items():
            text = text.replace(space, entry)
        return list(self._merges.encode(text, add_special_tokens=False).ids) if text else []

    def _fewest(self, text: bytes) -> list[int]:
        """The fewest tokens that join to the text, or to the longest beginning of it that any join to."""
        least: list[tuple[int, int]] = [(0, -1)] + [(0, -1)] * len(text)  # by where a text ends: tokens, the last one
        reach = 0
        for start in range(len(text)):
            if start and least[start][1] < 0:
                continue
            for length in self._lengths:
                end = start + length
                token = self._ids.get(text[start:end]) if end <= len(text) else None
                if token is not None and (least[end][1] < 0 or least[start][0] + 1 < least[end][0]):
                    least[end], reach = (least[start][0] + 1, token), max(reach, end)
        ids = list[int]()
        while reach:
            ids.append(least[reach][1])
            reach -= len(self._texts[ids[-1]])
        return ids[::-1]


def _merges(backend: Backend) -> Backend:
    """The tokenizer without anything that changes a text."""
    whole = {**json.loads(backend.to_str()), **UNCHANGED}
    whole["pre_tokenizer"] = _unprefixed(whole["pre_tokenizer"])
    if "dropout" in whole["model"]:
        whole["model"]["dropout"] = None
    return Backend.from_str(json.dumps(whole))


def _unprefixed(pre: Any) -> Any:
    """A pre-tokenizer that puts no space before a text."""
    if not isinstance(pre, dict):
        return pre
    changed = {key: [_unprefixed(each) for each in value] if isinstance(value, list) else value
               for key, value in pre.items()}  # fmt: skip
    if "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    if "prepend_scheme" in changed:
        changed["prepend_scheme"] = "never"
    return changed
