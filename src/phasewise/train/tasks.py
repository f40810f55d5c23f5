"""Generated tasks with checkable answers, in chat form.

Whether an example is for training or for evaluation is a property of its prompt (a hash), so the two never overlap
whatever seeds are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from phasewise.train.words import CITIES, COLORS, FILLER, NAMES, SHOUTED, WORDS

Message = dict[str, str]
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class TaskTurn:
    """One question and the answer that counts as right."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Example:
    """A conversation that ends with a question; `answer` is the expected reply and `check` scores one exactly."""

    messages: tuple[Message, ...]
    answer: str
    check: Callable[[str], bool]


KEYS, VALUES = WORDS[::2], WORDS[1::2]
Make = Callable[[Random, int], list[TaskTurn]]
"""Seeded generator: the turns of one conversation of at most about `tokens` tokens; later turns may be dropped."""


def pick(rng: Random, *choices: str) -> str:
    return rng.choice(choices)


def some_words(rng: Random, low: int, high: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(low, high))


def copy(rng: Random, tokens: int) -> list[TaskTurn]:
    """Repeat a text of words, numbers, names or letters."""
    longest = max(4, min(40, tokens // 3))
    size = rng.randint(1, longest if rng.random() < 0.5 else min(longest, 14))
    kind = rng.random()
    if kind < 0.6:
        text = " ".join(rng.choices(WORDS, k=size))
    elif kind < 0.7:
        text = " ".join(str(rng.randrange(100)) for _ in range(max(1, size // 3)))
    else:
        text = " ".join(_scrap(rng) for _ in range(max(1, size // 2)))
    return [TaskTurn(pick(rng, "Repeat: ", "Repeat this: ", "Copy this text: ", "Say: ") + text, text)]


def _scrap(rng: Random) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 4)))
    if kind == 1:
        return rng.choice(NAMES + CITIES) + rng.choice(("", ",", ".", "!", "?"))
    if kind == 2:
        return rng.choice(COLORS) + rng.choice(("", ",", ";", ":"))
    return str(rng.randrange(100)) if kind == 3 else rng.choice(WORDS)


def reverse(rng: Random, tokens: int) -> list[TaskTurn]:
    """Write a list backwards."""
    items = some_words(rng, 2, 8) if rng.random() < 0.75 else list(map(str, rng.sample(range(10), rng.randint(2, 7))))
    ask = pick(rng, "Reverse: ", "Reverse this list: ", "Write this backwards: ")
    return [TaskTurn(ask + " ".join(items), " ".join(reversed(items)))]


def sort(rng: Random, tokens: int) -> list[TaskTurn]:
    """Sort numbers by size or words by alphabet."""
    if rng.random() < 0.5:
        items = some_words(rng, 2, 5)
        return [TaskTurn(pick(rng, "Sort these words: ", "Sort: ") + " ".join(items), " ".join(sorted(items)))]
    numbers = rng.sample(range(100), rng.randint(2, 6))
    ask = pick(rng, "Sort these numbers: ", "Sort: ") + " ".join(map(str, numbers))
    return [TaskTurn(ask, " ".join(map(str, sorted(numbers))))]


def arithmetic(rng: Random, tokens: int) -> list[TaskTurn]:
    """Add or subtract digit by digit, steps written out; only the result after "so" is scored."""
    digits = rng.randint(1, 3)
    a, b = rng.randrange(10**digits), rng.randrange(10**digits)
    if rng.random() < 0.6:
        ask = pick(rng, f"What is {a} + {b}?", f"{a} + {b} =", f"Add {a} and {b}.")
        return [TaskTurn(ask, f"{_sum_steps(a, b)}, so {a + b}")]
    a, b = max(a, b), min(a, b)
    ask = pick(rng, f"What is {a} - {b}?", f"{a} - {b} =", f"Subtract {b} from {a}.")
    return [TaskTurn(ask, f"{_difference_steps(a, b)}, so {a - b}")]


def _sum_steps(a: int, b: int) -> str:
    steps: list[str] = []
    carry, result = 0, ""
    while a or b or not steps:
        total = a % 10 + b % 10 + carry
        last = a < 10 and b < 10
        result = f"{total if last else total % 10}{result}"
        steps.append(f"{a % 10}+{b % 10}+{carry}={total}: {result}")
        a, b, carry = a // 10, b // 10, total // 10
    return ", ".join(steps)


def _difference_steps(a: int, b: int) -> str:
    steps: list[str] = []
    borrow, result = 0, ""
    while a or not steps:
        top, bottom = a % 10, b % 10
        lent = 10 if top < bottom + borrow else 0
        result = f"{top + lent - bottom - borrow}{result}"
        steps.append(f"{top + lent}-{bottom}-{borrow}={result[0]}: {result}")
        a, b, borrow = a // 10, b // 10, lent // 10
    return ", ".join(steps)


def recall(rng: Random, tokens: int) -> list[TaskTurn]:
    """Word pairs among filler that fill about `tokens` tokens, then questions about single pairs."""
    count = max(2, min(len(KEYS), (tokens - 40) // 6))
    pairs = {key: f"{key} {rng.choice(VALUES)}" for key in rng.sample(KEYS, count)}
    sentences = [f"{pair}." for pair in pairs.values()]
    sentences += rng.choices(FILLER, k=max(0, (tokens - 40 - 3 * count) // 6))
    rng.shuffle(sentences)
    first, *later = rng.sample(list(pairs), min(12, count))
    opening = f"{pick(rng, 'Remember: ', 'Pairs: ')}{' '.join(sentences)}"
    made = [TaskTurn(f"{opening} Which word goes with {first}?", pairs[first])]
    several = later[: rng.randint(0, len(later))]
    if len(several) > 1:
        made.append(TaskTurn(f"Which words go with {', '.join(several)}?", ", ".join(pairs[key] for key in several)))
    return made + [TaskTurn(f"Which word goes with {key}?", pairs[key]) for key in later if key not in several]


def passkey(rng: Random, tokens: int) -> list[TaskTurn]:
    """Pass keys of one or two people hidden in filler that fills about `tokens` tokens."""
    owners = rng.sample(NAMES, rng.randint(1, 2))
    facts = [f"The pass key of {owner} is {' '.join(rng.sample(WORDS, 2))}." for owner in owners]
    text = rng.choices(FILLER, k=max(1, (tokens - 60) * 10 // 58))
    for fact in facts:
        text.insert(rng.randint(0, len(text)), fact)
    first, *later = [TaskTurn(f"What is the pass key of {who}?", fact) for who, fact in zip(owners, facts, strict=True)]
    return [TaskTurn(f"{' '.join(text)} {first.prompt}", first.answer), *later]


def json_object(rng: Random, tokens: int) -> list[TaskTurn]:
    """Write a small JSON object from a description."""
    person: dict[str, str | int] = {"name": rng.choice(NAMES), "age": rng.randint(1, 99), "city": rng.choice(CITIES),
                                    "color": rng.choice(COLORS)}  # fmt: skip
    if rng.random() < 0.4:
        fields = ["name", "age", "city"]
        ask = f"{person['name']} is {person['age']} years old and lives in {person['city']}. Write this as JSON."
    else:
        fields = rng.sample(list(person), rng.randint(1, 4))
        listed = ", ".join(f"{field} {person[field]}" for field in fields)
        ask = pick(rng, f"Write JSON: {listed}", f"Make a JSON object with {listed}.")
    return [TaskTurn(ask, json.dumps({field: person[field] for field in fields}))]


def edit(rng: Random, tokens: int) -> list[TaskTurn]:
    """Replace, delete, add or upper-case one word of a text."""
    items = some_words(rng, 3, 9)
    at, kind = rng.randrange(len(items)), rng.randrange(4)
    if kind == 0:
        new = rng.choice(WORDS)
        ask, items2 = f"Replace {items[at]} by {new}: ", [*items[:at], new, *items[at + 1 :]]
    elif kind == 1:
        ask, items2 = f"Delete {items[at]}: ", [*items[:at], *items[at + 1 :]]
    elif kind == 2:
        new = rng.choice(WORDS)
        ask, items2 = f"Add {new} at the end: ", [*items, new]
    else:
        items[at] = rng.choice(SHOUTED)
        ask, items2 = f"Uppercase {items[at]}: ", [w.upper() if w == items[at] else w for w in items]
    return [TaskTurn(ask + " ".join(items), " ".join(items2))]


def list_operation(rng: Random, tokens: int) -> list[TaskTurn]:
    """Ask for one fact about a list: an end, the size, membership, the largest or smallest number."""
    if rng.random() < 0.3:
        numbers = rng.sample(range(100), rng.randint(2, 6))
        name, value = rng.choice([("largest", max(numbers)), ("smallest", min(numbers))])
        return [TaskTurn(f"What is the {name} number: {' '.join(map(str, numbers))}", str(value))]
    items = some_words(rng, 3, 9)
    member = rng.choice(items) if rng.random() < 0.5 else rng.choice(WORDS)
    ask, answer = rng.choice(
        [
            ("What is the first word: ", items[0]),
            ("What is the last word: ", items[-1]),
            ("What is the second word: ", items[1]),
            ("How many words: ", str(len(items))),
            (f"Is {member} in the list: ", "yes" if member in items else "no"),
        ]
    )
    return [TaskTurn(ask + " ".join(items), answer)]


def second(rng: Random, tokens: int) -> list[TaskTurn]:
    """A list, and then questions that cannot be answered without it."""
    items = some_words(rng, 3, 7)
    text = " ".join(items)
    opening = [
        TaskTurn(f"My list: {text}", "OK"),
        TaskTurn(f"Repeat: {text}", text),
        TaskTurn(f"Remember this list: {text}", "OK"),
    ]
    asked = [
        TaskTurn("Which word came first?", items[0]),
        TaskTurn("Which word came last?", items[-1]),
        TaskTurn("Which word came second?", items[1]),
        TaskTurn("How many words were there?", str(len(items))),
        TaskTurn("Repeat the list.", text),
        TaskTurn("Now backwards.", " ".join(reversed(items))),
        TaskTurn("Now sorted.", " ".join(sorted(items))),
    ]
    gone, new = rng.choice(items), rng.choice(WORDS)
    asked += [
        TaskTurn(f"Now without {gone}.", " ".join(word for word in items if word != gone)),
        TaskTurn(f"Now with {new} at the end.", f"{text} {new}"),
        TaskTurn(f"What came after {items[-2]}?", items[-1]),
    ]
    return [rng.choice(opening), *rng.sample(asked, rng.randint(1, 3))]


TASKS: dict[str, Make] = {
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
    "arithmetic": arithmetic,
    "recall": recall,
    "passkey": passkey,
    "json": json_object,
    "edit": edit,
    "list": list_operation,
    "second": second,
}
ASKED = {"second": 1}
"""Which of a conversation's questions is the example's, where it is not the first."""


def held_out(prompt: str) -> bool:
    """True if a prompt belongs to the evaluation part (one in 16, by hash)."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def turns(task: str, rng: Random, tokens: int, evaluation: bool) -> list[TaskTurn]:
    """The turns of one conversation on `task`, from the training or the evaluation part."""
    while True:
        made = TASKS[task](rng, tokens)
        if held_out(made[0].prompt) == evaluation:
            return made


def example(task: str, rng: Random, tokens: int = 256) -> Example:
    """One evaluation example of about `tokens` tokens at most, with its exact scorer."""
    made, asked = turns(task, rng, tokens, evaluation=True), ASKED.get(task, 0)
    messages: list[Message] = []
    for turn in made[:asked]:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    messages.append({"role": "user", "content": made[asked].prompt})
    return Example(tuple(messages), made[asked].answer, checker(task, made[asked].answer))


def checker(task: str, answer: str) -> Callable[[str], bool]:
    """Exact match after trimming; arithmetic compares the final result only, JSON the parsed value."""
    if task == "arithmetic":
        return lambda reply: reply.rpartition("so ")[2].strip() == answer.rpartition("so ")[2]
    if task == "json":
        return lambda reply: _parsed(reply) == json.loads(answer)
    return lambda reply: reply.strip() == answer


def _parsed(reply: str) -> object:
    try:
        return json.loads(reply)
    except ValueError:
        return None
