"""Material of loads: random tokens, held-out library code, generated tasks in the pocket model's own form."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from phasewise.bench.prompts import Prompts, random_prompts, text_prompts
from phasewise.bench.quality import TextCodec, drawn
from phasewise.known.corpus import sources
from phasewise.load import model_path
from phasewise.model.tokenizer import Tokenizer, begun
from phasewise.train.tasks import Example

SHRINK = 8  # of lengths in a quick run
STRANGER = "smollm2"  # nobody here has trained it


@cache
def pocket_text() -> TextCodec:
    return TextCodec.load(Path(model_path("pocket")))


@cache
def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(model_path(model))


@cache
def code_ids(model: str = "pocket") -> tuple[int, ...]:
    """All held-out library source, in a model's tokens: the pocket model's, or those of one that is not made of it."""
    return tuple(_tokenizer(model).encode("\n\n".join(sources(held_out=True).values()), False))


def stretch(start: int, length: int, model: str = "pocket") -> list[int]:
    """A text of `length` tokens: what the model expects before every text, then held-out source from there on."""
    begin = _tokenizer(model).begin
    return begun(code_ids(model)[start : start + length], begin)[:length]


def stretch_to(end: int, length: int, model: str = "pocket") -> list[int]:
    """A text of `length` tokens whose last is the one before `end` in the held-out source."""
    own = length - len(_tokenizer(model).begin)
    return stretch(end - own, length, model)


def examples(row: str, n: int, seed: int) -> list[Example]:
    """Evaluation examples of a row of `bench.quality`, the same ones for the same seed."""
    return drawn(row, n, seed)


@dataclass
class PromptSource:
    """A source of prompts for one load: seeded, small ones for a quick run."""

    vocab: int
    seed: int
    quick: bool
    _random: Prompts = field(init=False)
    _code: Prompts = field(init=False)

    def __post_init__(self) -> None:
        ours = self.vocab >= max(code_ids())  # a model with the pocket model's vocabulary
        begin = _tokenizer("pocket").begin if ours else []
        self._random = random_prompts(self.vocab, self.seed, begin)
        self._code = text_prompts(code_ids(), self.seed, begin) if ours else self._random

    def size(self, n: int, least: int = 1) -> int:
        """A length or number as it is, or of a quick run."""
        return max(least, n // SHRINK) if self.quick else n

    def random(self, length: int) -> list[int]:
        """Random token ids."""
        return self._random(length)

    def code(self, length: int) -> list[int]:
        """A stretch of held-out library source; random ids for a model with another vocabulary."""
        return self._code(length)

    def piece(self, length: int) -> list[int]:
        """The same, to stand within a prompt: without what comes before a text."""
        return self._code.piece(length)

    def begun(self, ids: list[int]) -> list[int]:
        """A prompt of these ids, after what comes before every text."""
        return begun(ids, self._code.begin)

    def chats(self, row: str, n: int) -> list[tuple[list[int], int]]:
        """Questions of a task as prompts, each with the tokens of its right answer."""
        text = pocket_text()
        return [(text.chat(e.messages), len(text.encode(e.answer))) for e in examples(row, n, self.seed)]
