"""Decoding a token stream: never half a character, never twice, and in total exactly the text of all ids."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

from tokenizers import Tokenizer as Backend

INVALID = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
LONGEST_CHARACTER = 4  # bytes in UTF-8
CONTEXT = 8  # tokens before a text that leading-space rules may look at


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable stand-ins in which byte-level vocabularies are written, each to its byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


ALPHABET = _byte_alphabet()


class Pieces:
    """The vocabulary entries of ids, skipping hidden and unknown ones; `known` is shared by one tokenizer's streams."""

    def __init__(self, backend: Backend, hidden: frozenset[int], known: dict[int, str]) -> None:
        self.backend = backend
        self._hidden = hidden
        self._known = known

    @cached_property
    def invalid(self) -> list[int]:
        """Byte tokens of U+FFFD, which stand for a byte that is part of no character; none where there are none."""
        found = [self.backend.token_to_id(f"<0x{byte:02X}>") for byte in INVALID.encode()]
        return [] if None in found else [i for i in found if i is not None]

    def visible(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        return [(i, piece) for i in ids if i not in self._hidden and (piece := self._piece(i))]

    def _piece(self, i: int) -> str:
        piece = self._known.get(i)
        if piece is None:
            piece = self._known[i] = self.backend.id_to_token(i) or ""
        return piece


class ByteStream:
    """For byte-level vocabularies: each token is a run of bytes, so an incremental UTF-8 decoder is exact and O(1)."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = False  # the decoder holds the beginning of a character

    def push(self, ids: Sequence[int]) -> str:
        new = b"".join([token_bytes(piece) for _, piece in self._pieces.visible(ids)])
        if not self._half and new.isascii():
            return new.decode("ascii")
        text = self._utf8.decode(new)
        self._half = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


@lru_cache(1 << 16)
def token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


class WindowStream:
    """For every other vocabulary: decode a short window that begins at the last emitted tokens, emit what is new.

    The window's first tokens are context: leading-space rules then see the same neighbours as in the whole text. Byte
    tokens (<0xE4>) are held until they are whole characters; one that is part of none is U+FFFD. An end that may still
    become a character is held too.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._window: list[int] = []
        self._bytes: list[tuple[int, int]] = []  # byte tokens that begin a character: (id, byte)
        self._context = 0  # how many of the window's tokens have been emitted whole
        self._shown = ""  # the window's text that has been emitted
        self._waiting = 0  # tokens since the window's end was last a whole character

    def follow(self, before: Sequence[int]) -> None:
        """Has the text go on from that of these ids, which is not emitted: its first space is its own."""
        size = CONTEXT
        while not (visible := self._pieces.visible(before[-size:])) and size < len(before):
            size *= 8
        self._take(visible[-CONTEXT:])
        self._slide()

    def push(self, ids: Sequence[int]) -> str:
        visible = self._pieces.visible(ids)
        before = len(self._window)
        self._take(visible)
        if len(self._window) == before:
            return ""
        text = self._text(self._window)
        self._waiting += len(visible)
        if text.endswith(INVALID) and self._waiting < LONGEST_CHARACTER and not self._ends_invalid():
            return self._emit(text[:-1])
        delta = self._emit(text)
        if delta:
            self._slide()
        return delta

    def flush(self) -> str:
        self._break()
        return self._emit(self._text(self._window)) if self._window else ""

    def _take(self, visible: Sequence[tuple[int, str]]) -> None:
        """Has these tokens join the window, byte tokens as soon as they are characters."""
        for i, piece in visible:
            if BYTE_TOKEN.fullmatch(piece) is None:
                self._break()
                self._window.append(i)
                continue
            self._bytes.append((i, int(piece[3:5], 16)))
            while self._bytes and not _may_grow(run := bytes([byte for _, byte in self._bytes])):
                if _is_character(run):
                    self._window += [i for i, _ in self._bytes]
                    self._bytes.clear()
                else:
                    self._window += self._pieces.invalid
                    del self._bytes[0]

    def _break(self) -> None:
        """Gives up on bytes that were to become a character."""
        if self._bytes:
            self._window += self._pieces.invalid * len(self._bytes)
            self._bytes.clear()

    def _ends_invalid(self) -> bool:
        """True if the window's last byte is known to be part of no character."""
        known = self._pieces.invalid
        return bool(known) and self._window[-len(known) :] == known

    def _emit(self, text: str) -> str:
        delta = text[len(self._shown) :]
        self._shown = text
        return delta

    def _slide(self) -> None:
        """Keep only the tokens emitted just now, as context for the next."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = self._text(self._window)
        self._waiting = 0

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._pieces.backend.decode(list(ids), skip_special_tokens=False))


def _is_character(run: bytes) -> bool:
    """True if these bytes are one character."""
    try:
        return len(run.decode()) == 1
    except UnicodeDecodeError:
        return False


def _may_grow(run: bytes) -> bool:
    """True if these bytes are the beginning of a character, and not all of it."""
    try:
        run.decode()
        return False
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
