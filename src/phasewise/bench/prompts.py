"""Sources of prompts: random ids, the standard library's source, a text file. No prompt comes twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from phasewise.errors import UserError
from phasewise.model.tokenizer import begun


@dataclass(frozen=True)
class Prompts:
    """A source of prompts. `draw` gives the next stretch of so many tokens; `begin` is what comes before every text."""

    draw: Callable[[int], list[int]]
    begin: Sequence[int] = ()

    def __call__(self, length: int) -> list[int]:
        """The next prompt, of so many tokens with those before every text."""
        return begun(self.draw(length), self.begin)[:length]

    def piece(self, length: int) -> list[int]:
        """So many tokens that stand within a prompt."""
        return self.draw(length)


def prompts_from(kind: str, model: str, vocab: int, seed: int) -> Prompts:
    """`random`, `code`, or the path of a text file, in the tokens of `model`. Raises UserError."""
    if kind == "random":
        return random_prompts(vocab, seed, begin_of(model))
    from phasewise.known.corpus import sources
    from phasewise.load import model_path
    from phasewise.model.tokenizer import Tokenizer

    if kind == "code":
        text = "\n\n".join(sources(held_out=True).values())
    elif Path(kind).is_file():
        text = Path(kind).read_text(encoding="utf-8")
    else:
        raise UserError(f"prompts={kind!r}: say random, code, or the path of a text file")
    tokenizer = Tokenizer.load(model_path(model))
    return text_prompts(tokenizer.encode(text, add_special=False), seed, tokenizer.begin)


def begin_of(model: str) -> list[int]:
    """The ids that the tokenizer of the model called `model` puts before a text; empty where it has no tokenizer."""
    from phasewise.load import model_path
    from phasewise.model.tokenizer import Tokenizer

    try:
        return Tokenizer.load(model_path(model)).begin
    except UserError:
        return []


def random_prompts(vocab: int, seed: int, begin: Sequence[int] = ()) -> Prompts:
    """Prompts of random token ids; the first three ids, special in most vocabularies, are left out."""
    rng = Random(f"prompts {seed}")
    low = min(3, vocab - 1)
    return Prompts(lambda length: [rng.randrange(low, vocab) for _ in range(length)], begin)


def text_prompts(ids: Sequence[int], seed: int, begin: Sequence[int] = ()) -> Prompts:
    """Stretches of one long text, each starting at another place; prompts longer than the text wrap around."""
    if not ids:
        raise UserError("the text for prompts is empty")
    rng, used = Random(f"text {seed}"), set[int]()

    def take(length: int) -> list[int]:
        start = rng.randrange(len(ids))
        while start in used and len(used) < len(ids):
            start = rng.randrange(len(ids))
        used.add(start)
        return [ids[(start + i) % len(ids)] for i in range(length)]

    return Prompts(take, begin)
