"""What a contender answers: right answers to generated tasks, loss on held-out code."""

from __future__ import annotations

import statistics
from random import Random

from phasewise.bench.forced import Forced
from phasewise.reproduce.headroom import questions
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import finish, going_on
from phasewise.reproduce.system import Quality, Setting
from phasewise.reproduce.workload import STRANGER, code_ids, stretch
from phasewise.request.params import Params
from phasewise.request.request import Request

JUDGED = 64  # tokens of an edited one that are judged


def code(lab: Lab, setting: Setting, quality: Quality, n: int) -> list[float]:
    """Minus the loss of each of n stretches of code, in the tokens of the setting's model."""
    return (edited if quality.edited else losses)(lab, setting, quality, n)


def right(lab: Lab, setting: Setting, task: str, n: int, temperature: float = 0.0) -> list[float]:
    """1 for every question of `task` that is answered exactly right, else 0. At a temperature each has its own seed."""
    asked, text = questions(task, n, lab.scale.seed)
    requests = [Request(one.prompt, Params(one.room, temperature, seed=seed)) for seed, one in enumerate(asked)]
    with lab.engine(setting) as engine:
        finish(engine, requests)
    return [float(one.check(text(request.out))) for one, request in zip(asked, requests)]


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
