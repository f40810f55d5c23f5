"""Quality of every contender on the same examples: right answers to generated tasks, loss on held-out code."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from phasewise.bench import stats
from phasewise.bench.forced import Forced
from phasewise.bench.quality import CODE_LOSS, Row, mean, proportion
from phasewise.bench.stats import Difference
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import finish, going_on
from phasewise.reproduce.system import Quality, Setting
from phasewise.reproduce.verdict import Check
from phasewise.reproduce.workload import STRANGER, code_ids, examples, pocket_text, stretch
from phasewise.request.params import Params
from phasewise.request.request import Request

Tell = Callable[[str], object]
ENDS = 8  # tokens beyond the right answer that a reply may have
FEWEST = 6  # examples of a quick run
JUDGED = 64  # tokens of an edited one that are judged


@dataclass(frozen=True)
class Graded:
    """The grades of every contender for every example: 1 or 0, or for the loss on code minus nats per token."""

    grades: Mapping[str, Mapping[str, list[float]]]  # by role, then task

    def rows(self) -> list[tuple[str, Row]]:
        """A row per role and task, with its interval."""
        return [(role, _row(task, each)) for role, tasks in self.grades.items() for task, each in tasks.items()]

    def between(self, role: str, other: str) -> Difference:
        """All tasks together."""
        a, b = ([g for each in self.grades[who].values() for g in each] for who in (role, other))
        return stats.means(a, b) if CODE_LOSS in self.grades[role] else stats.shares(a, b)

    @property
    def percent(self) -> bool:
        return not any(CODE_LOSS in tasks for tasks in self.grades.values())


def _row(task: str, grades: list[float]) -> Row:
    if task == CODE_LOSS:
        return mean(task, "nats/token", [-grade for grade in grades])
    return proportion(task, round(sum(grades)), len(grades))


def graded(lab: Lab, quality: Quality, settings: Mapping[str, Setting], tell: Tell) -> Graded:
    """Ask everybody everything."""
    scale = lab.scale
    n = scale.examples or (min(FEWEST, quality.examples) if scale.quick else quality.examples)
    grades: dict[str, dict[str, list[float]]] = {}
    for role, setting in settings.items():
        tell(f"quality: {role}")
        grades[role] = {
            task: code(lab, setting, quality, n) if task == CODE_LOSS else right(lab, setting, task, n)
            for task in quality.tasks
        }
    return Graded(grades)


def code(lab: Lab, setting: Setting, quality: Quality, n: int) -> list[float]:
    """Minus the loss of each of n stretches of code, in the tokens of the setting's model."""
    return (edited if quality.edited else losses)(lab, setting, quality, n)


def right(lab: Lab, setting: Setting, task: str, n: int) -> list[float]:
    """1 for every example of `task` that is answered exactly right, else 0."""
    text, items = pocket_text(), examples(task, n, lab.scale.seed)
    room = max(len(text.encode(item.answer)) for item in items) + ENDS
    requests = [Request(text.chat(item.messages), Params(max_tokens=room)) for item in items]
    with lab.engine(setting) as engine:
        finish(engine, requests)
    return [float(item.check(text.decode(request.out))) for item, request in zip(items, requests)]


def losses(lab: Lab, setting: Setting, quality: Quality, n: int) -> list[float]:
    """Minus the loss of each of n stretches of code, nats per token: the engine is made to write them, all at once."""
    rng, model, forced = Random(f"{lab.scale.seed} code"), _source(setting), Forced()
    requests = []
    for _ in range(n):
        text = stretch(rng.randrange(len(code_ids(model)) - quality.window), quality.window, model)
        room = Params(max_tokens=quality.window - quality.given, ignore_eos=True)
        requests.append(Request(text[: quality.given], room))
        forced.scripts[requests[-1].id], forced.nats[requests[-1].id] = text, {}
    with lab.engine(setting, sample=forced) as engine:
        finish(engine, requests)
    return [-statistics.fmean(forced.nats[request.id].values()) for request in requests]


def edited(lab: Lab, setting: Setting, quality: Quality, n: int) -> list[float]:
    """Minus the loss of the last tokens of each of n stretches of code, of which the engine has met another version:
    there, half as many other tokens stood in the place of those that are new now."""
    rng, model, forced = Random(f"{lab.scale.seed} edited"), _source(setting), Forced()
    ids = code_ids(model)
    grades = []
    with lab.engine(setting, sample=forced) as engine:
        for _ in range(n):
            start, other = (rng.randrange(len(ids) - quality.window) for _ in range(2))
            text = stretch(start, quality.window, model)
            at = rng.randrange(quality.window // 8, quality.window // 2)
            prompt = text[: quality.window - JUDGED]
            instead = list(ids[other : other + quality.edited // 2])
            before = Request(
                prompt[:at] + instead + prompt[at + quality.edited :], Params(max_tokens=1, ignore_eos=True)
            )
            now = going_on(engine, Params(max_tokens=JUDGED, ignore_eos=True), before)
            for request, said in ((before, [*before.prompt, 0]), (after := Request(prompt, now), text)):
                forced.scripts[request.id], forced.nats[request.id] = said, {}
                finish(engine, [request])
            grades.append(-statistics.fmean(forced.nats[after.id].values()))
    return grades


def _source(setting: Setting) -> str:
    """The model in whose tokens the code is."""
    return STRANGER if setting.model == STRANGER else "pocket"


def quality_checks(quality: Quality, found: Graded) -> list[Check]:
    """Checks that the method keeps the baseline's quality, and that the control does not keep the method's."""
    kept, lead = found.between("method", "baseline"), found.between("method", "control")
    what = "right answers" if found.percent else "log-likelihood of code"
    limit = f"{quality.allowed * 100:g} points" if found.percent else f"{quality.allowed:g} nats"
    return [
        Check("quality", f"{what}, method less baseline", kept.text(found.percent), f"all of it above -{limit}",
              kept.low > -quality.allowed),
        Check("control", f"{what}, method less control", lead.text(found.percent), "all of it above 0", lead.low > 0),
    ]  # fmt: skip
