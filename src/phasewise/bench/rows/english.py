"""Pass keys in plain English: five digits somewhere in everyday sentences, asked for at the end.

Anybody who reads English can answer, so a row says of any model how far it looks back, with its methods. Harder rows
hide the keys of several people: unlike ones, or such that differ in one digit. The filler is made here: sentences of
six patterns and as many word lists, none of them twice in a text and none with a digit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from phasewise.bench.quality import RowScores, graded
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError
from phasewise.train.words import NAMES

Ask = Callable[[str, str], list[int]]
"""The prompt for a question, of a model with the interface `Subject.ask`."""
LENGTHS = {
    "passkey-english@1k": 1000,
    "passkey-english@2k": 2000,
    "passkey-english@4k": 4000,
    "passkey-english@7.5k": 7500,
    "passkey-english@12k": 12_000,
    "passkey-english@16k": 16_000,
    "keys-english@1.8k": 1800,
    "near-english@1.8k": 1800,
}
"""Row name -> length of its prompts, in the model's own tokens, chat template included."""
HARDER = {"keys-english@1.8k": False, "near-english@1.8k": True}
"""Rows with the keys of `PEOPLE` people, and whether these differ from the right one in one digit."""
PEOPLE = 8
FURTHER = ("passkey-english@12k", "passkey-english@16k", *HARDER)  # for whoever names them
ROOM = 24  # tokens of a reply

TASK = (
    "Below is a long text. One sentence in it tells the pass key, a number of five digits. Find this number and "
    "remember it."
)
FACT = "The pass key is {key}. Remember it: {key} is the pass key."
QUESTION = "What is the pass key, the number of five digits in the text above?"
OPENING = "The pass key is"  # of the answer, where a model has no chat template to be asked through
TASK_OF_MANY = "Below is a long text. In it are the pass keys of several people, numbers of five digits. Remember them."
FACT_OF_ONE = "The pass key of {owner} is {key}. Remember it: {key} is the pass key of {owner}."
QUESTION_OF_ONE = "What is the pass key of {owner}?"
OPENING_OF_ONE = "The pass key of {owner} is"

WHO = (
    "my neighbour", "the old baker", "a young doctor", "the bus driver", "our teacher", "the gardener",
    "her cousin", "the librarian", "a tall stranger", "the night guard", "his aunt", "the carpenter",
    "a quiet student", "the postman", "the shop owner", "an old friend", "the fisherman", "the painter",
    "the new manager", "a tired traveller", "the violin player", "our landlord", "the farmer", "the youngest child",
    "a retired pilot", "the nurse",
)  # fmt: skip
DID = (
    "repaired", "carried", "found", "painted", "sold", "forgot", "described", "cleaned", "borrowed", "photographed",
    "measured", "hid", "bought", "admired", "returned", "opened", "weighed", "packed", "lost", "polished", "drew",
)  # fmt: skip
WHAT = (
    "a wooden chair", "the green bicycle", "two loaves of bread", "an old map", "the kitchen clock",
    "a basket of pears", "the broken lamp", "a box of letters", "the heavy suitcase", "a woollen coat",
    "the garden gate", "a jar of honey", "the silver spoon", "a bundle of newspapers", "the yellow boat",
    "a pair of boots", "the small radio", "a red kite", "the copper kettle", "a sack of potatoes",
    "the tall ladder", "a book about birds", "the torn umbrella",
)  # fmt: skip
WHERE = (
    "behind the station", "near the river", "in the empty hall", "at the edge of the village", "under the bridge",
    "beside the fountain", "on the second floor", "in front of the museum", "at the market", "along the canal",
    "outside the bakery", "in the long corridor", "by the lighthouse", "next to the chapel", "across the square",
    "in the shade of the oak", "at the far end of the yard", "on the ferry", "in a narrow street",
    "above the workshop",
)  # fmt: skip
WHEN = (
    "early in the morning", "after lunch", "before the rain came", "late on Sunday", "during the holidays",
    "while the others slept", "on a cold evening", "at the end of the summer", "shortly before noon", "last winter",
    "when the music stopped", "in the middle of the week", "on the first warm day", "after a long silence",
)  # fmt: skip
HOW = (
    "the weather was mild", "nobody said a word", "the streets were full of people", "a dog barked in the distance",
    "the coffee had gone cold", "somebody laughed upstairs", "the train was late again",
    "the leaves were turning brown", "it smelled of fresh paint", "the lights went out for a moment",
    "the wind came from the sea", "a door was left open",
)  # fmt: skip
SHORT = (
    "It was late.", "Nobody knew.", "It rained.", "Time went by.", "All was well.", "The sun rose.", "Birds sang.",
    "She smiled.", "He waited.", "Snow fell.", "The bell rang.", "They agreed.", "We rested.", "It grew dark.",
    "Yes.", "No.",
)  # fmt: skip


def sentences(rng: Random) -> Iterator[str]:
    """Everyday sentences without end, none twice; there are millions."""
    said = set()
    while True:
        who, did, what, where, when, how = (rng.choice(words) for words in (WHO, DID, WHAT, WHERE, WHEN, HOW))
        sentence = rng.choice((
            f"{who} {did} {what} {where}.", f"{when}, {who} {did} {what}.", f"{who} {did} {what} {when}, and {how}.",
            f"{where}, {how} when {who} {did} {what}.", f"{how}, so {who} {did} {what} {where} {when}.",
            f"{when}, {how}, and {who} {did} {what} {where}.",
        ))  # fmt: skip
        if sentence not in said:
            said.add(sentence)
            yield sentence[0].upper() + sentence[1:]


@dataclass(frozen=True)
class HiddenFacts:
    """The facts that a text hides, each at a depth from 0 to 1, and how it is asked for."""

    task: str
    facts: Sequence[tuple[float, str]]
    question: str
    opening: str

    def ask(self, ask: Ask, filler: Sequence[str]) -> list[int]:
        """The prompt with this filler around the facts."""
        text = list(filler)
        for depth, fact in sorted(self.facts, reverse=True):
            text.insert(round(depth * len(filler)), fact)
        return ask(f"{self.task}\n\n{' '.join(text)}\n\n{self.question}", self.opening)


def prompt(ask: Ask, rng: Random, length: int) -> tuple[list[int], str]:
    """A prompt of `length` tokens, or up to 1 % fewer, and the key that it asks for.

    Raises UserError where the tokenizer makes the task longer than that even without filler.
    """
    key, depth = str(rng.randrange(10_000, 100_000)), rng.random()
    return _filled(ask, rng, length, HiddenFacts(TASK, [(depth, FACT.format(key=key))], QUESTION, OPENING)), key


def crowd(ask: Ask, rng: Random, length: int, near: bool) -> tuple[list[int], str]:
    """As `prompt`, with the keys of eight people, of whom one is asked for. `near`: the others' keys differ from the
    right one in one digit, which is not the first."""
    owners, key = rng.sample(NAMES, PEOPLE), str(rng.randrange(10_000, 100_000))
    if near:
        unlike = [key[:at] + digit + key[at + 1 :] for at in range(1, 5) for digit in "0123456789" if digit != key[at]]
        others = rng.sample(unlike, PEOPLE - 1)
    else:
        others = [str(rng.randrange(10_000, 100_000)) for _ in owners[1:]]
    facts = [
        (rng.random(), FACT_OF_ONE.format(owner=owner, key=one))
        for owner, one in zip(owners, [key, *others], strict=True)
    ]
    who = owners[0]
    asked = HiddenFacts(TASK_OF_MANY, facts, QUESTION_OF_ONE.format(owner=who), OPENING_OF_ONE.format(owner=who))
    return _filled(ask, rng, length, asked), key


def asked(name: str, ask: Ask, rng: Random, count: int) -> list[tuple[list[int], str]]:
    """The prompts of a row, and the key that each asks for."""
    if name in HARDER:
        return [crowd(ask, rng, LENGTHS[name], HARDER[name]) for _ in range(count)]
    return [prompt(ask, rng, LENGTHS[name]) for _ in range(count)]


def _filled(ask: Ask, rng: Random, length: int, hidden: HiddenFacts) -> list[int]:
    stream = sentences(rng)
    filler = [next(stream) for _ in range(length // 4)]  # no tokenizer writes such a sentence in four tokens

    def made(n: int, short: Sequence[str] = ()) -> list[int]:
        return hidden.ask(ask, [*filler[:n], *short])

    if len(made(0)) > length:
        raise UserError(f"the question alone has {len(made(0))} tokens, more than {length}: ask for more")
    n = _most(lambda n: len(made(n)) <= length, len(filler))
    short: list[str] = []
    for sentence in rng.sample(SHORT, len(SHORT)):  # what is left is shorter than any sentence: fill it with short ones
        if len(made(n, [*short, sentence])) <= length:
            short.append(sentence)
    return made(n, short)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, of numbers that fit up to some point; 0 does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def right(reply: str, key: str) -> bool:
    """True if the first number of a reply is the key."""
    found = re.search(r"\d[\d,]*", reply)
    return found is not None and found[0].replace(",", "") == key


def passkey(name: str, subject: Subject, rng: Random, examples: int) -> RowScores:
    """The share of keys that are answered."""
    some = asked(name, subject.ask, rng, examples)
    replies = subject.generate([ids for ids, _ in some], ROOM)
    said = [subject.text.decode(reply) for reply in replies]
    return graded(name, [right(reply, key) for reply, (_, key) in zip(said, some, strict=True)])
