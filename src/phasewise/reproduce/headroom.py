"""Tasks on which neither model is nearly always right, so that a method has something to lose.

The pocket model finds single words in its whole context without a mistake. It is asked for a dozen of them at once, and
draws its answer at a temperature. smollm2 is asked in English for one of several pass keys, greedily.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from random import Random

from phasewise.bench.quality import ASKED
from phasewise.bench.rows import english
from phasewise.load import model_path
from phasewise.model.chat import ChatTemplate
from phasewise.model.tokenizer import Tokenizer
from phasewise.reproduce.workload import STRANGER, examples, pocket_text
from phasewise.train.tasks import Message, turns

SEVERAL, KEYS = "several@2k", "keys-english@750"
TOKENS, LEAST = 1900, 8  # of a text of word pairs, and the pairs asked for at once
OWNERS, SENTENCES = 4, 30  # pass keys in a text, and sentences around them: 750 of smollm2's tokens
ENDS = 8  # tokens beyond the right answer that a reply may have
INTRODUCED = "Below is a long text. Some sentences in it tell pass keys, numbers of five digits. Remember them."
LOWEST, HIGHEST = 0.2, 0.95


@dataclass(frozen=True)
class AskedQuestion:
    """A prompt (token ids), the most tokens of a reply, and what tells a right one."""

    prompt: list[int]
    room: int
    check: Callable[[str], bool]


def has_room(share: float) -> bool:
    """True if a baseline that gives this share of right answers leaves room for better and for worse ones."""
    return LOWEST <= share <= HIGHEST


def questions(task: str, n: int, seed: int) -> tuple[list[AskedQuestion], Callable[[list[int]], str]]:
    """The same n questions of a task for the same seed, and what turns a reply into text."""
    if task == KEYS:
        rng = Random(f"{seed} {task}")
        return [_keys(rng) for _ in range(n)], stranger_text().decode
    if task in english.LENGTHS:
        some = english.asked(task, lambda said, _: stranger_chat(said), Random(f"{seed} {task}"), n)
        return [
            AskedQuestion(ids, english.ROOM, partial(english.right, key=key)) for ids, key in some
        ], stranger_text().decode
    text = pocket_text()
    if task == SEVERAL:
        rng = Random(f"{seed} {task}")
        asked = [_several(rng) for _ in range(n)]
        found = [AskedQuestion(text.chat(said), len(text.encode(right)) + ENDS, _says(right)) for said, right in asked]
        return found, text.decode
    items = examples(task, n, seed)
    room = max(len(text.encode(item.answer)) for item in items) + ENDS
    return [AskedQuestion(text.chat(item.messages), room, item.check) for item in items], text.decode


def known(task: str) -> bool:
    """True for a task that `questions` asks."""
    return task in ASKED or task in (SEVERAL, KEYS, *english.LENGTHS)


def _says(right: str) -> Callable[[str], bool]:
    return lambda reply: reply.strip() == right


def _several(rng: Random) -> tuple[list[Message], str]:
    """A text of word pairs, a question about one of them with its answer, and a question about many."""
    while True:
        one, two, *_ = [*turns("recall", rng, TOKENS, evaluation=True), None, None]
        if one is not None and two is not None and two.prompt.startswith("Which words") and len(
            two.answer.split(", ")
        ) >= LEAST:  # fmt: skip
            said = [("user", one.prompt), ("assistant", one.answer), ("user", two.prompt)]
            return [{"role": role, "content": content} for role, content in said], two.answer


def _keys(rng: Random) -> AskedQuestion:
    """Everyday sentences, the pass keys of several people among them, and a question about one."""
    stream, owners = english.sentences(rng), rng.sample(english.WHO, OWNERS)
    keys = [str(rng.randrange(10_000, 100_000)) for _ in owners]
    text = [next(stream) for _ in range(SENTENCES)]
    for owner, key in zip(owners, keys):
        text.insert(rng.randrange(len(text) + 1), f"The pass key of {owner} is {key}.")
    which = rng.randrange(OWNERS)
    said = f"{INTRODUCED}\n\n{' '.join(text)}\n\nWhat is the pass key of {owners[which]}?"
    return AskedQuestion(stranger_chat(said), english.ROOM, lambda reply: english.right(reply, keys[which]))


@cache
def stranger_text() -> Tokenizer:
    """The tokenizer of the model that nobody here has trained."""
    return Tokenizer.load(model_path(STRANGER))


@cache
def _template() -> ChatTemplate:
    return ChatTemplate.load(model_path(STRANGER))


def stranger_chat(said: str) -> list[int]:
    """A prompt that asks it this, through its chat template."""
    return stranger_text().encode(_template().render([{"role": "user", "content": said}]), False)
