"""The bytes that each token of a vocabulary adds to a text: the one place that knows them.

They follow from the vocabulary entry and the decoder of `tokenizer.json` alone. Encoding a text never tells them: a
normalizer or a pre-tokenizer may change the text first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tokenizers import Tokenizer as Backend

from phasewise.model.stream import BYTE_TOKEN, token_bytes

SPACE = "\u2581"  # how SentencePiece writes a space
Step = Callable[[str | bytes], str | bytes]  # of one token; bytes once it is no entry of the vocabulary any more


class TokenBytes:
    """Maps a token id to the bytes that it adds to a text which it does not begin.

    `unknown` names the decoder of which no token alone says what it adds (WordPiece, for example), or is "". `spaces`
    maps the entry of a space, and anything else that the decoder replaces by one, to that space.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.unknown = ""
        self.spaces: dict[str, str] = {}
        self._steps: list[Step] = []
        self._strip = ("", 0)  # a character, and how many of it go where a text begins
        self._dropped = ""  # in a token that begins a text, this goes wherever it stands
        self._joined = self._has_bytes = False
        for step in decoders(_state(backend)):
            self._take(step)
        if not self._steps and not self._joined:
            self.unknown = self.unknown or "no decoder"

    def __call__(self, i: int) -> bytes:
        """The bytes of a token; none if the id is padding. Of a decoder that is `unknown`: those of its entry."""
        piece = self._backend.id_to_token(i)
        if piece is None:
            return b""
        if self.unknown:
            return str(piece).replace(SPACE, " ").encode()
        return self._decoded(str(piece))

    def begins(self, i: int) -> bytes:
        """The same of a token that begins a text: some decoders leave out a space there."""
        text, (letter, most) = self(i), self._strip
        if self._dropped:
            text = self._decoded(str(self._backend.id_to_token(i) or "").replace(self._dropped, ""))
        for _ in range(most):
            text = text.removeprefix(letter.encode())
        return text

    def _decoded(self, piece: str) -> bytes:
        value: str | bytes = piece
        for step in self._steps:
            value = step(value)
        return value.encode() if isinstance(value, str) else value

    def _take(self, step: Mapping[str, Any]) -> None:
        """One more step of the decoder, in their order."""
        kind = str(step["type"])
        if kind == "ByteLevel" and not self._joined:
            self._steps.append(_byte_level)
            self._joined = self._has_bytes = True
        elif kind == "ByteFallback" and not self._joined:
            self._steps.append(_byte_fallback)
            self._has_bytes = True
        elif kind == "Fuse":
            self._joined = True
        elif kind == "Replace" and self._replaceable(step):
            self._replace(step["pattern"]["String"], step["content"])
        elif kind == "Metaspace" and not self._joined:
            self._replace(step["replacement"], " ")
            if step.get("prepend_scheme", "always") != "never":
                self._dropped = step["replacement"]
        elif kind == "Strip" and (not self._joined or (step["stop"] == 0 and step["content"].isascii())):
            self._take_strip(step["content"], step["start"], step["stop"])
        elif not self.unknown:
            self.unknown = kind

    def _take_strip(self, content: str, start: int, stop: int) -> None:
        """A step that strips each token or, where they are joined before it, the text."""
        if self._joined:
            self._strip = (content, start)
        else:
            self._steps.append(partial(_stripped, content, start, stop))

    def _replaceable(self, step: Mapping[str, Any]) -> bool:
        """True if each token by itself is replaced as the whole text would be."""
        pattern = step["pattern"].get("String")
        if not pattern or (self._joined and len(pattern) > 1):
            return False
        return not self._has_bytes or len(pattern) == 1

    def _replace(self, pattern: str, content: str) -> None:
        if content == " ":
            self.spaces[pattern] = content
        self._steps.append(partial(_replaced, pattern, content))


def _state(backend: Backend) -> Mapping[str, Any] | None:
    """A decoder as `tokenizer.json` has it."""
    decoder: Any = backend.decoder
    state: Mapping[str, Any] | None = None if decoder is None else json.loads(decoder.__getstate__())
    return state


def decoders(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a decoder, sequences within sequences laid out."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for each in decoder["decoders"] for step in decoders(each)]


def _byte_level(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else token_bytes(value)


def _byte_fallback(value: str | bytes) -> str | bytes:
    return bytes([int(value[3:5], 16)]) if isinstance(value, str) and BYTE_TOKEN.fullmatch(value) else value


def _replaced(pattern: str, content: str, value: str | bytes) -> str | bytes:
    if isinstance(value, str):
        return value.replace(pattern, content)
    return value.replace(pattern.encode(), content.encode())


def _stripped(letter: str, start: int, stop: int, value: str | bytes) -> str | bytes:
    """Without so many of a character at either end of one token."""
    if isinstance(value, bytes):
        return value
    for _ in range(start):
        value = value.removeprefix(letter)
    for _ in range(stop):
        value = value.removesuffix(letter)
    return value
