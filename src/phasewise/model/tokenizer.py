"""Text to token ids and back, from a checkpoint's `tokenizer.json`; whole texts, or token by token as they come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from phasewise.errors import UserError
from phasewise.model.source import source
from phasewise.model.stream import INVALID, ByteStream, Pieces, WindowStream
from phasewise.model.token_bytes import TokenBytes

LONG = 4096  # characters; with longer texts other threads must not wait, and `encode` alone keeps the interpreter


def beginning(backend: Backend) -> list[int]:
    """The ids that a tokenizer puts before a text, such as a BOS token; empty for most that have none."""
    probe = "a"
    plain = backend.encode(probe, add_special_tokens=False).ids
    whole = backend.encode(probe, add_special_tokens=True).ids
    at = next((i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain), 0)
    return list(whole[:at])


def begun(ids: Sequence[int], begin: Sequence[int]) -> list[int]:
    """A prompt of these ids as a model expects it: what its tokenizer puts before a text (`begin`) comes first, once,
    also where a chat template or the text itself has written it."""
    return list(ids) if [*ids[: len(begin)]] == [*begin] else [*begin, *ids]


def why_no_text(given: object) -> str:
    """Why this cannot be encoded."""
    if not isinstance(given, str):
        kind = type(given).__name__
        return f"{given!r:.40} is {kind}, not text" + (": decode it first" if isinstance(given, bytes) else "")
    at = next((i for i, char in enumerate(given) if "\ud800" <= char <= "\udfff"), 0)
    return (
        f"the text has a lone surrogate (U+{ord(given[at]):04X}) at position {at}, which is no character: it comes "
        "from bytes that are not UTF-8, or from half of a pair. Decode the bytes as what they are, or leave it out"
    )


class Tokenizer:
    """A `tokenizers` pipeline and the special tokens named beside it."""

    def __init__(self, backend: Backend, special: dict[str, str] | None = None) -> None:
        self.backend = backend
        self.special = special or {}  # bos_token, eos_token, ...: their text
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.known: dict[int, str] = {}  # vocabulary entries seen by detokenizers, in the vocabulary's spelling

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Loads the tokenizer of the model in a directory or a .gguf file, or of a hub id; UserError when there is none
        or it is broken."""
        files = source(path)
        return cls(files.tokenizer(), files.special())

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; `add_special` puts what the checkpoint's template adds around a text, such as a BOS. As in
        `transformers`, a text that has written its own BOS gets another one. UserError for what is no text."""
        try:
            if len(text) < LONG:
                return list(self.backend.encode(text, add_special_tokens=add_special).ids)
            return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        except TypeError:
            raise UserError(why_no_text(text)) from None

    @cached_property
    def begin(self) -> list[int]:
        """The ids that are put before a text: see `beginning`."""
        return beginning(self.backend)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest vocabulary entry: a text of n characters has some n / longest tokens or more."""
        return max((len(self.token(i) or "") for i in range(self.size)), default=1)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids, invalid UTF-8 as U+FFFD; special tokens are left out unless asked for.

        Of byte tokens, those that are characters are kept where others beside them are none.
        """
        text = str(self.backend.decode(list(ids), skip_special_tokens=skip_special))
        if self.byte_level or INVALID not in text:
            return text
        stream = Detokenizer(self, skip_special)
        return stream.push(ids) + stream.flush()

    def id(self, token: str) -> int | None:
        """The id of a token's exact text, or None."""
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)

    def token(self, i: int) -> str | None:
        """The vocabulary entry of an id, in the vocabulary's own spelling, or None."""
        found = self.backend.id_to_token(i)
        return None if found is None else str(found)

    @cached_property
    def bytes_of(self) -> TokenBytes:
        """The bytes that each token adds to a text."""
        return TokenBytes(self.backend)

    def raw(self, i: int) -> bytes:
        """The bytes that a token stands for, of special ones their name; none if the id is padding."""
        piece = self.token(i)
        return piece.encode() if piece is not None and i in self.special_ids else self.bytes_of(i)

    @property
    def size(self) -> int:
        """The number of ids that the tokenizer knows; a model's vocabulary may be padded beyond that."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))


class Detokenizer:
    """Decodes one request's ids as they come: all pushes and the flush joined are `Tokenizer.decode` of all ids, with
    special tokens that are `shown` although others are skipped. After the ids `before`, they are what these ids add to
    the text of those: a space in front of the first word stays.

    A push never ends in half a character; what it holds back comes with a later push or with `flush`.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, shown: Collection[int] = (), before: Sequence[int] = ()
    ) -> None:
        hidden = tokenizer.special_ids - frozenset(shown) if skip_special else frozenset()
        pieces = Pieces(tokenizer.backend, hidden, tokenizer.known)
        self._stream: ByteStream | WindowStream = ByteStream(pieces)
        if not tokenizer.byte_level:
            self._stream = WindowStream(pieces)
            self._stream.follow(before)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete, perhaps empty."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """Returns what was held back, at the end of the output."""
        return self._stream.flush()
