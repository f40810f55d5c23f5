"""Pass keys in plain English: five digits somewhere in everyday sentences, asked for at the end.

Anybody who reads English can answer, so the row says of any model how far it looks back, with its methods. The filler
is made here: sentences of six patterns and as many word lists, none of them twice in a text and none with a digit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

from phasewise.bench.quality import RowScores, graded
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError

LENGTHS = {
    "passkey-english@1k": 1000,
    "passkey-english@2k": 2000,
    "passkey-english@4k": 4000,
    "passkey-english@7.5k": 7500,
    "passkey-english@12k": 12_000,
    "passkey-english@16k": 16_000,
}
"""Row name -> length of its prompts, in the model's own tokens, chat template included."""
FURTHER = ("passkey-english@12k", "passkey-english@16k")  # for whoever asks: a small model's methods may reach so far
ROOM = 24  # tokens of a reply

TASK = (
    "Below is a long text. One sentence in it tells the pass key, a number of five digits. Find this number and "
    "remember it."
)
FACT = "The pass key is {key}. Remember it: {key} is the pass key."
QUESTION = "What is the pass key, the number of five digits in the text above?"
OPENING = "The pass key is"  # of the answer, where a model has no chat template to be asked through

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


def prompt(subject: Subject, rng: Random, length: int) -> tuple[list[int], str]:
    """A prompt of `length` tokens, or up to 1 % fewer, and the key that it asks for.

    Raises UserError where the tokenizer makes the task longer than that even without filler.
    """
    key, depth = str(rng.randrange(10_000, 100_000)), rng.random()
    stream = sentences(rng)
    filler = [next(stream) for _ in range(length // 4)]  # no tokenizer writes such a sentence in four tokens

    def made(n: int, short: Sequence[str] = ()) -> list[int]:
        text = [*filler[:n], *short]
        text.insert(round(depth * len(text)), FACT.format(key=key))
        return subject.ask(f"{TASK}\n\n{' '.join(text)}\n\n{QUESTION}", OPENING)

    if len(made(0)) > length:
        raise UserError(f"the question alone has {len(made(0))} tokens, more than {length}: ask for more")
    n = _most(lambda n: len(made(n)) <= length, len(filler))
    short: list[str] = []
    for sentence in rng.sample(SHORT, len(SHORT)):  # what is left is shorter than any sentence: fill it with short ones
        if len(made(n, [*short, sentence])) <= length:
            short.append(sentence)
    return made(n, short), key


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
    asked = [prompt(subject, rng, LENGTHS[name]) for _ in range(examples)]
    replies = subject.generate([ids for ids, _ in asked], ROOM)
    said = [subject.text.decode(reply) for reply in replies]
    return graded(name, [right(reply, key) for reply, (_, key) in zip(said, asked, strict=True)])
