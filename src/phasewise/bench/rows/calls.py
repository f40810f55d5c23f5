"""Sums with a calculator at hand: the model calls it, is told the result, and says it. Numbers were never trained on.

For models that `phasewise train tools` has taught. The result that the calculator gives is that of the model's own
expression; right is an answer that has the number which the question asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from phasewise.bench.quality import RowScores, graded
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError
from phasewise.train.calculations import Problem, calculate, longer, problem, reworded, two
from phasewise.train.tasks import Example, example
from phasewise.train.toolbox import PLAIN, ToolOffer, offer, renamed
from phasewise.train.tooluse import call

ROOM, ANSWER = 96, 32  # tokens of a call, of an answer
IDLE = ("copy", "reverse", "json", "list")
CALL = re.compile(r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def _among(rng: Random) -> ToolOffer:
    """Tools as in training, two of them."""
    while True:
        made = offer(rng)
        if made.name and len(made.tools) > 1:
            return made


def _plain(rng: Random) -> ToolOffer:
    return PLAIN


SUMS: dict[str, tuple[Callable[[Random], Problem], Callable[[Random], ToolOffer]]] = {
    "calculator": (two, _plain),
    "calculator-longer": (longer, _plain),  # three numbers
    "calculator-reworded": (reworded, _plain),  # in wordings that were never trained on
    "calculator-renamed": (two, renamed),  # names of tool and parameter that were never trained on
    "calculator-among": (two, _among),  # another tool beside it
}
UNCALLED = "calculator-idle"  # other questions, which need no tool
ROWS = (*SUMS, UNCALLED)


def measure(name: str, subject: Subject, examples: int, seed: int) -> RowScores:
    """A row on `examples` examples drawn with `seed`. Raises UserError for a model that is shown no tools."""
    if subject.offer is None:
        raise UserError(f"{name} is asked with a tool, and this model's chat template shows none: --model pocket-tools")
    rng = Random(f"{seed} {name}")
    if name == UNCALLED:
        return _idle(name, subject, [example(IDLE[i % len(IDLE)], rng, 96) for i in range(examples)])
    draw, offered = SUMS[name]
    asked = [problem(rng, True, draw) for _ in range(examples)]
    offers = [offered(rng) for _ in range(examples)]
    answers = _answers(subject, asked, offers)
    return graded(name, [at in answers and has(answers[at], one) for at, one in enumerate(asked)])


def _answers(subject: Subject, asked: Sequence[Problem], offers: Sequence[ToolOffer]) -> dict[int, str]:
    """{number of a question: the answer given once the calculator's result was told}, where it was called."""
    talks: dict[int, list[Mapping[str, Any]]] = {}
    questions: list[Mapping[str, Any]] = [{"role": "user", "content": one.question} for one in asked]
    for at, said in enumerate(_ask(subject, [[each] for each in questions], offers, ROOM)):
        found = result(said, offers[at])
        if found is not None:
            talks[at] = [questions[at], call(offers[at], found[0]), {"role": "tool", "content": found[1]}]
    answers = _ask(subject, list(talks.values()), [offers[at] for at in talks], ANSWER) if talks else []
    return dict(zip(talks, answers, strict=True))


def result(said: str, offered: ToolOffer) -> tuple[str, str] | None:
    """The expression of an answer that is one call of the calculator, and its value; None for anything else."""
    found = CALL.fullmatch(said)
    try:
        made = json.loads(found[1]) if found else None
        arguments = made["arguments"] if isinstance(made, dict) and made.get("name") == offered.name else None
        expression = arguments.get(offered.parameter) if isinstance(arguments, dict) else None
        return (expression, calculate(expression)) if isinstance(expression, str) else None
    except (ValueError, KeyError):
        return None


def has(answer: str, asked: Problem) -> bool:
    """True if an answer in words has the number that was asked for."""
    return asked.result in NUMBER.findall(answer) and "<tool_call>" not in answer


def _idle(name: str, subject: Subject, asked: Sequence[Example]) -> RowScores:
    said = _ask(subject, [list(one.messages) for one in asked], [PLAIN] * len(asked), ROOM)
    return graded(name, [one.check(text) for one, text in zip(asked, said, strict=True)])


def _ask(
    subject: Subject, talks: Sequence[Sequence[Mapping[str, Any]]], offers: Sequence[ToolOffer], room: int
) -> list[str]:  # fmt: skip
    assert subject.offer is not None
    prompts = [subject.offer(talk, offered.tools) for talk, offered in zip(talks, offers, strict=True)]
    return [subject.text.decode(reply) for reply in subject.generate(prompts, room)]
