"""The second question of a conversation: whether a method still finds what the first one did not ask for."""

from __future__ import annotations

from random import Random

from phasewise.bench.forced import Forced, follow
from phasewise.bench.rows.later import grades, talks
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Setting
from phasewise.reproduce.workload import pocket_text

TOKENS = 1000  # of the text


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
