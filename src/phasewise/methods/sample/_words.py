"""A model's vocabulary as bytes, for a grammar to say which tokens may come next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Backend

from phasewise.errors import UserError
from phasewise.model.stream import BYTE_TOKEN, token_bytes
from phasewise.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from phasewise.model.model import Model

SPACE = "\u2581"  # how SentencePiece writes a space
BYTE_LEVEL = "ByteLevel"
PLAIN = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}  # decoders that join tokens byte by byte
INSTALL = "pip install 'phasewise[grammar]'"
Bits = np.ndarray[Any, np.dtype[np.int32]]


class Words:
    """The tokens of one model: what each adds to a text, and which end it. Special tokens are no text, nor are ids
    beyond the tokenizer's own."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        self.vocab, self.ends = vocab, tuple(ends)
        self.special = tokenizer.special_ids | set(ends)
        self.bytes = list(spelled(tokenizer, vocab))
        self.width = -(-vocab // 32)  # int32 of a mask
        first = [i for i, text in enumerate(self.bytes) if text.startswith(b" ") and i not in self.special]
        self.strips: Bits | None = None  # tokens whose leading space goes where they begin a text
        if first and not tokenizer.decode(first[:1]).startswith(" "):
            self.strips = self.mask(first)
        self._tokenizer = tokenizer

    def mask(self, tokens: Sequence[int]) -> Bits:
        """Some tokens as bits, int32 [vocab / 32]."""
        bits = np.zeros(self.width * 32, dtype=np.uint8)
        bits[list(tokens)] = 1
        packed: Bits = np.packbits(bits, bitorder="little").view(np.int32)
        return packed

    def tokenizer(self) -> LLTokenizer:
        """For llguidance. Raises UserError where that is not installed."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise UserError(f"grammars need the extra ({error}): {INSTALL}") from error
        return LLTokenizer(TokenizerWrapper(_Wrapped(self, self._tokenizer)), eos_token=list(self.ends))


class _Wrapped:
    """The vocabulary by the names that llguidance has for it."""

    def __init__(self, words: Words, tokenizer: Tokenizer) -> None:
        self.eos_token_id, self.bos_token_id = words.ends[0], None
        self.tokens, self.special_token_ids = words.bytes, sorted(i for i in words.special if i < words.vocab)
        self._backend = Backend.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True  # what a grammar forces is text, though it may spell such a token

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def words_of(model: Model) -> Words:
    """The vocabulary of a model. Raises UserError for a model without a tokenizer or an end token, and for a tokenizer
    whose tokens are no runs of bytes."""
    config, files = model.config, model.files
    return _words(files.path, files.stamp(), config.vocab, tuple(config.eos))


@lru_cache(maxsize=4)
def _words(path: Path, stamp: tuple[Any, ...], vocab: int, ends: tuple[int, ...]) -> Words:
    if not ends:
        raise UserError("a grammar needs a model with an end token: this one has none, so no text could end")
    return Words(Tokenizer.load(path), vocab, ends)


def spelled(tokenizer: Tokenizer, vocab: int) -> Iterator[bytes]:
    """The bytes that each id adds to a text. Raises UserError for a tokenizer of which that cannot be said."""
    kinds = decoders(json.loads(tokenizer.backend.to_str())["decoder"])
    if kinds != {BYTE_LEVEL} and not (kinds and kinds <= PLAIN):
        raise UserError(f"grammars know byte-level and SentencePiece tokenizers, not one that joins tokens by {kinds}")
    for i in range(vocab):
        piece = tokenizer.token(i) or ""
        if kinds == {BYTE_LEVEL}:
            yield token_bytes(piece)
        elif "ByteFallback" in kinds and BYTE_TOKEN.fullmatch(piece):
            yield bytes([int(piece[3:5], 16)])
        else:
            yield piece.replace(SPACE, " ").encode()


def decoders(decoder: dict[str, Any] | None) -> set[str]:
    """The kinds of decoders that a tokenizer's one is made of."""
    if decoder is None:
        return set()
    inner = decoder.get("decoders")
    return {str(decoder["type"])} if inner is None else {kind for each in inner for kind in decoders(each)}
