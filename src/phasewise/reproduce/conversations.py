"""The second question of a conversation: whether a method still finds what the first one did not ask for."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from phasewise.bench.forced import Forced, follow
from phasewise.bench.rows.later import grades, talks
from phasewise.bench.stats import shares
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Setting, Tried
from phasewise.reproduce.workload import pocket_text

TOKENS = 1000  # of the text
MANY, FEW = 60, 6  # second questions, and those of a quick run


def number(lab: Lab) -> int:
    """How many second questions are asked."""
    return lab.scale.examples or (FEW if lab.scale.quick else MANY)


def seconds(lab: Lab, setting: Setting, n: int, evaluation: bool = True) -> list[float]:
    """1 for every second question about a text that is answered right, else 0, as the rows `later@..` of `phasewise
    eval` ask it.

    `evaluation`: texts of the part that is reported; knobs are chosen on the other one.
    """
    text, forced, ends = pocket_text(), Forced(), lab.model("pocket").config.eos
    some = talks(text, Random(f"{lab.scale.seed} second"), n, TOKENS, evaluation)
    with lab.engine(setting, sample=forced) as engine:
        found = grades(some, text, lambda jobs, room: follow(engine, forced, jobs, room, ends))
    return [float(grade) for grade in found]


def compared(lab: Lab, method: Setting, losing: Mapping[str, Setting], beside: Mapping[str, Setting]) -> Tried:
    """Whether `method` answers more second questions than every setting of `losing` does; those `beside` are shown."""
    n = number(lab)
    found = {name: seconds(lab, each, n) for name, each in {"method": method, **beside, **losing}.items()}
    leads = {name: shares(found["method"], found[name]) for name in losing}
    said = "; ".join(f"less {name} {lead.text(True)}" for name, lead in leads.items())
    words = ", ".join(f"{name} {sum(grades) / n:.0%}" for name, grades in found.items())
    return Tried(all(lead.low > 0 for lead in leads.values()), f"{said} ({words}, of {n})")
