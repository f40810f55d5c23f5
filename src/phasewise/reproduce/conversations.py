"""The second question of a conversation: whether a method still finds what the first one did not ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from phasewise.bench.forced import Forced, follow
from phasewise.bench.rows.later import ENDS, Talk, grades, talks
from phasewise.bench.stats import shares
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import finish, going_on
from phasewise.reproduce.system import AttemptOutcome, Setting
from phasewise.reproduce.workload import pocket_text
from phasewise.request.params import Params
from phasewise.request.request import Request

TOKENS = 1000  # of the text
MANY, FEW = 60, 6  # second questions, and those of a quick run


def number(lab: Lab) -> int:
    """The number of second questions."""
    return lab.scale.examples or (FEW if lab.scale.quick else MANY)


def seconds(lab: Lab, setting: Setting, n: int, evaluation: bool = True) -> list[float]:
    """1 for every second question about a text that is answered right, else 0, as the rows `later@..` of `phasewise
    eval` ask it.

    `evaluation`: texts of the part that is reported; knobs are chosen on the other one.
    """
    text, forced, ends = pocket_text(), Forced(), lab.model("pocket").config.eos
    some = _talks(lab, n, evaluation)
    with lab.engine(setting, sample=forced) as engine:
        found = grades(some, text, lambda jobs, room: follow(engine, forced, jobs, room, ends))
    return [float(grade) for grade in found]


def _talks(lab: Lab, n: int, evaluation: bool = True) -> list[Talk]:
    return talks(pocket_text(), Random(f"{lab.scale.seed} second"), n, TOKENS, evaluation)


@dataclass
class SecondQuestions:
    """Results of second questions that were requests of their own: 1 for each answered right, else 0; tokens of their
    prompts; rows that they ran, and that they should have run if only what no turn before has rows for is computed."""

    grades: list[float] = field(default_factory=list)
    tokens: int = 0
    ran: int = 0
    new: int = 0


def in_turns(lab: Lab, setting: Setting, n: int) -> SecondQuestions:
    """The same questions. The first one is answered by the model itself; the second's request goes on from the KV that
    the first's has left, where that can be asked for."""
    text, found, some = pocket_text(), SecondQuestions(), _talks(lab, n)
    params = Params(max_tokens=max(len(text.encode(talk.answer)) for talk in some) + ENDS)
    with lab.engine(setting) as engine:
        for talk in some:
            finish(engine, [first := Request(talk.said[: talk.start], params)])
            second, before = Request(talk.said, going_on(engine, params, first)), engine.counters.rows
            finish(engine, [second])
            found.grades.append(float(text.decode(second.out).strip() == talk.answer))
            found.tokens += second.prompt_len
            found.ran += engine.counters.rows - before
            found.new += second.prompt_len - _common(first.tokens[:-1], talk.said) + second.n_out - 1
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of both."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def compared(lab: Lab, method: Setting, losing: Mapping[str, Setting], beside: Mapping[str, Setting]) -> AttemptOutcome:
    """Checks that `method` answers more second questions than every setting of `losing`; those `beside` are shown."""
    n = number(lab)
    return leading(
        {name: seconds(lab, each, n) for name, each in {"method": method, **beside, **losing}.items()}, losing
    )


def leading(found: Mapping[str, Sequence[float]], losing: Collection[str]) -> AttemptOutcome:
    """Checks that "method" answers more questions than all of `losing`; all are shown."""
    leads = {name: shares(found["method"], found[name]) for name in losing}
    said = "; ".join(f"less {name} {lead.text(True)}" for name, lead in leads.items())
    words = ", ".join(f"{name} {sum(grades) / len(grades):.0%}" for name, grades in found.items())
    return AttemptOutcome(all(lead.low > 0 for lead in leads.values()), f"{said} ({words}, of {len(found['method'])})")
