"""The second question of a conversation: whether a method still finds what the first one did not ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from torch import Tensor

from phasewise.bench.stats import shares
from phasewise.reproduce.answers import ENDS
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import finish
from phasewise.reproduce.system import Setting, Tried
from phasewise.reproduce.workload import pocket_text
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train.tasks import turns
from phasewise.verbs.sample import Context, Dist

TOKENS = 1000  # of the text
MANY, FEW = 60, 6  # second questions, and those of a quick run


def number(lab: Lab) -> int:
    """How many second questions are asked."""
    return lab.scale.examples or (FEW if lab.scale.quick else MANY)


@dataclass(frozen=True)
class Told:
    """sample: a request's text is given up to some token, and then the most likely ones."""

    texts: dict[str, list[int]]

    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        top = logits.argmax(-1).tolist()
        for row, context in enumerate(contexts):
            text = self.texts[context.request.id]
            if context.position < len(text):
                top[row] = text[context.position]
        return Dist(top, logits.shape[-1])


def seconds(lab: Lab, setting: Setting, n: int, evaluation: bool = True) -> list[float]:
    """1 for every second question about a text that is answered right, else 0. The first one is the prompt's; its right
    answer, and the second question, are then written token by token by the same request.

    `evaluation`: texts of the part that is reported; knobs are chosen on the other one.
    """
    text, rng, told = pocket_text(), Random(f"{lab.scale.seed} second"), Told({})
    requests, wanted = list[Request](), list[tuple[int, str]]()
    while len(requests) < n:
        one, *later = turns("recall", rng, TOKENS, evaluation=evaluation)
        single = [turn for turn in later if " word goes " in turn.prompt]
        if not single:
            continue
        two = single[0]
        asked = {"role": "user", "content": one.prompt}
        prompt = text.chat([asked])
        said = text.chat([asked, {"role": "assistant", "content": one.answer}, {"role": "user", "content": two.prompt}])
        room = len(text.encode(two.answer)) + ENDS
        requests.append(Request(prompt, Params(max_tokens=len(said) - len(prompt) + room, ignore_eos=True)))
        told.texts[requests[-1].id] = said
        wanted.append((len(said), two.answer))
    ends = set(lab.model("pocket").config.eos)
    with lab.engine(setting, sample=told) as engine:
        finish(engine, requests)
    grades = []
    for request, (start, answer) in zip(requests, wanted):
        reply = request.tokens[start:]
        stop = next((i for i, token in enumerate(reply) if token in ends), len(reply))
        grades.append(float(text.decode(reply[:stop]).strip() == answer))
    return grades


def compared(lab: Lab, method: Setting, losing: Mapping[str, Setting], beside: Mapping[str, Setting]) -> Tried:
    """Whether `method` answers more second questions than every setting of `losing` does; those `beside` are shown."""
    n = number(lab)
    found = {name: seconds(lab, each, n) for name, each in {"method": method, **beside, **losing}.items()}
    leads = {name: shares(found["method"], found[name]) for name in losing}
    said = "; ".join(f"less {name} {lead.text(True)}" for name, lead in leads.items())
    words = ", ".join(f"{name} {sum(grades) / n:.0%}" for name, grades in found.items())
    return Tried(all(lead.low > 0 for lead in leads.values()), f"{said} ({words}, of {n})")
