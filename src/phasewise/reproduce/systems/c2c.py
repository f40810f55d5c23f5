"""Cache-to-Cache: another model's cache of the prompt is fused into the receiver's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from phasewise.bench.stats import means, shares
from phasewise.methods.decode._fuser import SIDES
from phasewise.methods.decode._second import Rows
from phasewise.methods.decode.c2c import C2C, Fusing
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses, right
from phasewise.reproduce.controls import Control, drawn
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, Counter, Paper, Quality, Setting, System, Timing, Tried
from phasewise.request.request import Request
from phasewise.verbs.host import Host

PROMPT, NEW = 512, 8
METHOD, ALONE = Setting({"decode": "c2c"}), Setting()
DRAWN = Setting({"decode": "c2c:weights=random:0"})
CODE = Quality(("code",), allowed=0.02, examples=24, window=512, given=384)
TASKS = ("recall@256", "sort", "reverse", "second", "arithmetic")
EACH = 30  # examples of a task


@dataclass(frozen=True)
class Shuffled(Control):
    """decode: the same fuser, and the sharer's rows in an order drawn at random."""

    of: C2C
    plain_prompts: ClassVar[bool] = True

    def bind(self, host: Host) -> Fusing:
        made: Fusing = self.of.bind(host)
        return _Shuffled(made)


class _Shuffled(Fusing):
    def __init__(self, of: Fusing) -> None:
        vars(self).update(vars(of))

    def theirs(self, request: Request, stop: int) -> list[Rows]:
        places = torch.randperm(stop, generator=drawn("c2c", request.prompt[:8], stop))
        return [[(k[:, places], v[:, places]) for k, v in rows] for rows in super().theirs(request, stop)]


@dataclass(frozen=True)
class Reversed(Control):
    """decode: the same fuser, with every gate that is open closed, and every other open."""

    of: C2C
    plain_prompts: ClassVar[bool] = True

    def bind(self, host: Host) -> Fusing:
        made: Fusing = self.of.bind(host)
        for fuser in made.fusers:
            for side in SIDES:
                fuser.weights[f"{side}.gate"] = -fuser.weights[f"{side}.gate"]
        return made


def code_gain(lab: Lab) -> Tried:
    """A smaller loss than the receiver's alone."""
    n = min(lab.scale.examples or CODE.examples, 4 if lab.scale.quick else CODE.examples)
    gain = means(*(losses(lab, each, CODE, n) for each in (METHOD, ALONE)))
    return Tried(gain.low > 0, f"log-likelihood {gain.text(False)}")


def gates_matter(lab: Lab) -> Tried:
    """A smaller loss than with the gates the other way round."""
    n = min(lab.scale.examples or CODE.examples, 4 if lab.scale.quick else CODE.examples)
    turned = Setting(objects={"decode": Reversed(C2C())})
    gain = means(*(losses(lab, each, CODE, n) for each in (METHOD, turned)))
    return Tried(gain.low > 0, f"log-likelihood {gain.text(False)}")


def answers_gain(lab: Lab) -> Tried:
    """More right answers than the receiver alone."""
    n = min(lab.scale.examples or EACH, 6 if lab.scale.quick else EACH)
    mine, alone = ([g for task in TASKS for g in right(lab, each, task, n)] for each in (METHOD, ALONE))
    gain = shares(mine, alone)
    return Tried(gain.low > 0, gain.text(True))


SYSTEM = System(
    title="Cache-to-Cache (C2C)",
    paper=Paper("Cache-to-Cache: Direct Semantic Communication Between Large Language Models", "2510.03215"),
    claim="with another model's cache fused into its own, a model answers 8.5 to 10.5 % (absolute) better than either "
    "alone, and 3 to 5 % better than where they exchange text, in half the time.",
    conditions=("Qwen3-0.6B with Qwen2.5-0.5B, Llama-3.2-1B and others, models that know different things",
                "a fuser of width 1,024, trained on 500,000 conversations", "multiple choice"),
    method=METHOD,
    baseline=ALONE,
    control=Setting(objects={"decode": Shuffled(C2C())}),
    control_is="the same fuser over the sharer's rows in an order drawn at random",
    load=loads.lone(PROMPT, NEW),
    missing=("models with different tokenizers", "text sent from one to the other", "several sharers"),
    counters=(
        Counter("rows of the prompt that the receiver computes", "all of them, none twice",
                lambda case: case.work.prompt_rows, loads.prompt_rows),
        Counter("rows that are fused", "all but the last",
                lambda case: case.work.recalled, lambda case: loads.prompt_rows(case) - 1),
        Counter("passes of the sharer", "one for each 512 of these",
                lambda case: case.work.draft_forwards, lambda case: -(-(loads.prompt_rows(case) - 1) // 512)),
    ),
    quality=CODE,
    attempts=(
        Attempt("claim", "loss of code behind 384 tokens, method less the receiver alone", "all of it above 0",
                code_gain),
        Attempt("claim", f"right answers ({', '.join(TASKS)}), method less the receiver alone", "all of it above 0",
                answers_gain),
        Attempt("control", "loss of code, method less the same with open gates closed and closed ones open",
                "all of it above 0", gates_matter),
    ),
    timings=(Timing("seconds to the first token of 1,024 tokens (random weights)", 0.5, seconds=loads.per_token,
                    load=loads.lone(1024, 1), settings={"method": DRAWN}, price=True),),
    note="The sharer is pocket-draft, which was trained on the texts of the pocket model and knows nothing beside: "
    "what there is to gain here, the fuser itself has learned.",
)  # fmt: skip
