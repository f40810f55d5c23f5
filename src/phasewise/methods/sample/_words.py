"""A model's vocabulary as bytes, for a grammar to say which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phasewise.errors import UserError
from phasewise.methods.sample._spelling import Speller
from phasewise.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from phasewise.model.model import Model

INSTALL = "pip install 'phasewise[grammar]'"
Bits = np.ndarray[Any, np.dtype[np.int32]]


class Words:
    """The tokens of one model: what each adds to a text, and which end it. Special tokens are no text, nor are ids
    beyond the tokenizer's own."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        self.vocab, self.ends = vocab, tuple(ends)
        self.special = tokenizer.special_ids | set(ends)
        table = tokenizer.bytes_of
        if table.unknown:
            raise UserError(
                f"grammars know byte-level and SentencePiece tokenizers, not one that joins tokens by {table.unknown}"
            )
        self.bytes = [tokenizer.raw(i) for i in range(vocab)]
        self.width = -(-vocab // 32)  # int32 of a mask
        first = [i for i in range(vocab) if i not in self.special and table.begins(i) != self.bytes[i]]
        self.strips = self.mask(first) if first else None  # tokens that lose something where they begin a text
        self._tokenizer = tokenizer

    def mask(self, tokens: Sequence[int]) -> Bits:
        """Some tokens as bits, int32 [vocab / 32]."""
        bits = np.zeros(self.width * 32, dtype=np.uint8)
        bits[list(tokens)] = 1
        packed: Bits = np.packbits(bits, bitorder="little").view(np.int32)
        return packed

    @cached_property
    def speller(self) -> Speller:
        """Texts as these tokens."""
        return Speller(self._tokenizer, self.bytes, self.special)

    def tokenizer(self) -> LLTokenizer:
        """For llguidance. Raises UserError where that is not installed."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise UserError(f"grammars need the extra ({error}): {INSTALL}") from error
        return LLTokenizer(TokenizerWrapper(_Wrapped(self)), eos_token=list(self.ends))


def has(mask: Bits, token: int) -> bool:
    """True if the token is among those of a mask."""
    return bool(mask[token // 32] >> (token % 32) & 1)


class _Wrapped:
    """The vocabulary by the names that llguidance has for it."""

    def __init__(self, words: Words) -> None:
        self.eos_token_id, self.bos_token_id = words.ends[0], None
        self.tokens, self.special_token_ids = words.bytes, sorted(i for i in words.special if i < words.vocab)
        self._speller = words.speller

    def __call__(self, text: bytes | str) -> list[int]:
        return self._speller(text.encode() if isinstance(text, str) else text)


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
