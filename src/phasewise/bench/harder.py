"""Look-ups that leave a dense model headroom, so that methods which answer every easier one are told apart.

They keep the forms that models of the generated tasks have learned, and are never trained on: several keys asked for
at once, pass keys that differ in one character a word, and a second hop whose key is also the first hop's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from phasewise.train.tasks import KEYS, VALUES, Example, Message, TaskTurn, held_out
from phasewise.train.words import FILLER, NAMES, WORDS

AT_ONCE, PEOPLE, CHAINS = 8, 8, 20
PAIR, FACT, LINE = 3, 12, 6  # tokens of a pair, of a sentence with a pass key, of a sentence of filler
NEIGHBOURS = {
    word: [other for other in WORDS if len(other) == len(word) and sum(map(str.__ne__, word, other)) == 1]
    for word in WORDS
}
"""Word -> the words that differ from it in one character."""
CROWDED = [word for word in WORDS if len(NEIGHBOURS[word]) > 1]


@dataclass(frozen=True)
class Harder:
    """A row: who makes its conversations, and their length in tokens, about. The last turn is the question."""

    make: Callable[[Random, int], list[TaskTurn]]
    tokens: int


def keys(rng: Random, tokens: int) -> list[TaskTurn]:
    """Word pairs among filler, and one question about eight of them."""
    count = min(len(KEYS), (tokens - 40) // LINE)
    pairs = {key: f"{key} {rng.choice(VALUES)}" for key in rng.sample(KEYS, count)}
    asked = rng.sample(list(pairs), AT_ONCE)
    opening = _remember(rng, list(pairs.values()), tokens)
    return [TaskTurn(f"{opening} Which words go with {', '.join(asked)}?", ", ".join(pairs[key] for key in asked))]


def near(rng: Random, tokens: int) -> list[TaskTurn]:
    """The pass keys of eight people among filler: each word of every one differs from the right one in one character
    or in none."""
    owners = rng.sample(NAMES, PEOPLE)
    first = rng.choice(CROWDED)
    second = rng.choice([word for word in CROWDED if word != first and word not in NEIGHBOURS[first]])
    pairs = [(a, b) for a in (first, *NEIGHBOURS[first]) for b in (second, *NEIGHBOURS[second])]
    chosen = [pairs[0], *rng.sample(pairs[1:], PEOPLE - 1)]
    facts = [f"The pass key of {owner} is {a} {b}." for owner, (a, b) in zip(owners, chosen, strict=True)]
    text = rng.choices(FILLER, k=max(1, (tokens - 60 - FACT * PEOPLE) * 10 // 58))
    for fact in facts:
        text.insert(rng.randint(0, len(text)), fact)
    return [TaskTurn(f"{' '.join(text)} What is the pass key of {owners[0]}?", facts[0])]


def hops(rng: Random, tokens: int) -> list[TaskTurn]:
    """Chains of two word pairs among filler: the first question asks for a chain's middle, the second for its end. The
    middle also stands in the first pair, where its right neighbour is the wrong answer."""
    starts, middles = rng.sample(KEYS, CHAINS), rng.sample(VALUES, CHAINS)
    ends = rng.choices(VALUES, k=CHAINS)
    firsts = [f"{a} {b}" for a, b in zip(starts, middles, strict=True)]
    seconds = [f"{a} {b}" for a, b in zip(middles, ends, strict=True)]
    opening = _remember(rng, firsts + seconds, tokens)
    return [
        TaskTurn(f"{opening} Which word goes with {starts[0]}?", firsts[0]),
        TaskTurn(f"Which word goes with {middles[0]}?", seconds[0]),
    ]


def _remember(rng: Random, pairs: list[str], tokens: int) -> str:
    said = [f"{pair}." for pair in pairs] + rng.choices(FILLER, k=max(0, (tokens - 40 - PAIR * len(pairs)) // LINE))
    rng.shuffle(said)
    return f"Remember: {' '.join(said)}"


ROWS = {"keys@1.8k": Harder(keys, 1800), "near@1.8k": Harder(near, 1800), "hops@1.8k": Harder(hops, 1760)}
"""Row name -> what it asks."""


def example(name: str, rng: Random) -> Example:
    """One example of a row, from the part that no model is trained on."""
    row = ROWS[name]
    while not held_out((made := row.make(rng, row.tokens))[0].prompt):
        pass
    *before, last = made
    messages: list[Message] = []
    for turn in before:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    messages.append({"role": "user", "content": last.prompt})
    return Example(tuple(messages), last.answer, lambda reply: reply.strip() == last.answer)
