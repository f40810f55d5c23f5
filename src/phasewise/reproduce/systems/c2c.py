"""Cache-to-Cache: another model's cache of the prompt is fused into the receiver's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phasewise.bench.stats import means, shares
from phasewise.methods.decode._fuser import SIDES
from phasewise.methods.decode._second import Rows
from phasewise.methods.decode.c2c import C2C, Fusing
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses
from phasewise.reproduce.controls import Control, drawn
from phasewise.reproduce.knowers import KEYS, RECEIVER, SHARERS, WIDTH, facts, fuser
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import HOT, SHORT
from phasewise.reproduce.play import finish
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Quality, Setting, System, Timing
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

PROMPT, NEW = 512, 8
ASKED = 60  # facts of each model
METHOD, ALONE = Setting({"decode": "c2c"}), Setting()
DRAWN = Setting({"decode": "c2c:weights=random:0"})
CODE = Quality(("code",), allowed=0.02, examples=24, window=512, given=384)


def instead(made: Fusing, other: Callable[[list[Rows], Request, int], list[Rows]]) -> Fusing:
    """The runtime, with what `other` makes of the sharers' rows in their place."""
    theirs = made.theirs
    made.theirs = lambda request, stop: other(theirs(request, stop), request, stop)  # type: ignore[method-assign]
    return made


@dataclass(frozen=True)
class PermutedSharer(Control):
    """decode: the same fuser, and the sharer's rows in an order drawn at random."""

    of: C2C

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Fusing:
        def mixed(rows: list[Rows], request: Request, stop: int) -> list[Rows]:
            places = torch.randperm(stop, generator=drawn("c2c", request.prompt[:8], stop))
            return [[(k[:, places], v[:, places]) for k, v in each] for each in rows]

        return instead(self.of.bind(host), mixed)


@dataclass(frozen=True)
class Reversed(Control):
    """decode: the same fuser, with every gate that is open closed, and every other open."""

    of: C2C

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Fusing:
        made: Fusing = self.of.bind(host)
        for each in made.fusers:
            for side in SIDES:
                each.weights[f"{side}.gate"] = -each.weights[f"{side}.gate"]
        return made


def gates_matter(lab: Lab) -> AttemptOutcome:
    """A smaller loss than with the gates the other way round."""
    n = min(lab.scale.examples or CODE.examples, 4 if lab.scale.quick else CODE.examples)
    turned = Setting(objects={"decode": Reversed(C2C())})
    gain = means(*(losses(lab, each, CODE, n) for each in (METHOD, turned)))
    return AttemptOutcome(gain.low > 0, f"log-likelihood {gain.text(False)}")


@dataclass(frozen=True)
class Strangers(Control):
    """decode: the same fusers, and the sharers' rows of the prompt before."""

    of: C2C

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Fusing:
        last: list[list[Rows]] = []

        def before(rows: list[Rows], request: Request, stop: int) -> list[Rows]:
            last.append(rows)
            del last[:-2]
            return last[0]

        return instead(self.of.bind(host), before)


def fused(lab: Lab) -> C2C:
    """Both sharers, each with the fuser that was trained for it alone."""
    weights = []
    for name in SHARERS:
        path = lab.shelf.room / f"{name}.safetensors"
        if not path.is_file():
            fuser(name, [lab.model(each) for each in (RECEIVER, name)], path)
        weights.append(str(path))
    return C2C("+".join(SHARERS), width=WIDTH, weights="+".join(weights))


def said(lab: Lab, model: str, decode: Any = None) -> list[float]:
    """1 for every fact, of all three models, that this one says first of all, else 0; asked one after another."""
    n, grades = (12 if lab.scale.quick else ASKED), []
    with lab.engine(Setting(objects={} if decode is None else {"decode": decode}), model) as engine:
        for keys in KEYS.values():
            for prompt, reply in facts(keys, torch.Generator().manual_seed(9), n):
                finish(engine, [request := Request(prompt, Params(max_tokens=1, ignore_eos=True))])
                grades.append(float(request.out == reply))
    return grades


def facts_gain(lab: Lab) -> AttemptOutcome:
    """Two sharers that know different facts: more is said than any of the three models says by itself."""
    mine, each = said(lab, RECEIVER, fused(lab)), [said(lab, name) for name in KEYS]
    best = max(each, key=sum)
    gain, n = shares(mine, best), len(mine)
    alone = ", ".join(f"{sum(its) / n:.0%}" for its in each)
    return AttemptOutcome(gain.low > 0, f"{sum(mine) / n:.0%} of all facts, alone {alone}; {gain.text(True)}")


def facts_lost(lab: Lab) -> AttemptOutcome:
    """The same with the caches of other prompts."""
    mine, strangers = (said(lab, RECEIVER, each) for each in (fused(lab), Strangers(fused(lab))))
    gain = shares(mine, strangers)
    return AttemptOutcome(gain.low > 0, f"{sum(strangers) / len(mine):.0%} of all facts; {gain.text(True)}")


SYSTEM = System(
    title="Cache-to-Cache (C2C)",
    paper=Paper("Cache-to-Cache: Direct Semantic Communication Between Large Language Models", "2510.03215"),
    claim="with another model's cache fused into its own, a model answers 8.5 to 10.5 % (absolute) better than either "
    "alone, and 3 to 5 % better than where they exchange text, in half the time.",
    conditions=("Qwen3-0.6B with Qwen2.5-0.5B, Llama-3.2-1B and others, models that know different things",
                "a fuser of width 1,024, trained on 500,000 conversations", "multiple choice"),
    method=METHOD,
    baseline=ALONE,
    control=Setting(objects={"decode": PermutedSharer(C2C())}),
    control_is="the same fuser over the sharer's rows in an order drawn at random",
    line="another model's cache fused into one's own: 8.5 to 10.5 % more right answers than either model's",
    promises=("answers", "time"),
    load=loads.lone(PROMPT, NEW),
    missing=("models with different tokenizers", "text sent from one to the other"),
    counters=(
        Counter("rows of the prompt that the receiver computes", "all of them, none twice",
                lambda case: case.work.prompt_rows, loads.prompt_rows),
        Counter("rows that are fused", "all but the last",
                lambda case: case.work.recalled, lambda case: loads.prompt_rows(case) - 1),
        Counter("passes of the sharer", "one for each 512 of these",
                lambda case: case.work.draft_forwards, lambda case: -(-(loads.prompt_rows(case) - 1) // 512)),
    ),
    quality=(
        Quality(SHORT, None, 30, temperature=HOT, gains=True),
        Quality(("code",), None, 24, window=512, given=384, gains=True),
    ),
    attempts=(
        Attempt("answers", "facts of three tiny models, said by one with both others' caches, less the best alone",
                "all of it above 0", facts_gain, model=RECEIVER),
        Attempt("control", "facts of three tiny models, said by one, less those said with other prompts' caches",
                "all of it above 0", facts_lost, "answers", RECEIVER),
        Attempt("control", "loss of code, method less the same with open gates closed and closed ones open",
                "all of it above 0", gates_matter, "mechanism"),
    ),
    timings=(Timing("seconds to the first token of 1,024 tokens (random weights)", 0.5, seconds=loads.per_token,
                    load=loads.lone(1024, 1), settings={"method": DRAWN}, price=True),),
    note="On the pocket model the sharer is pocket-draft, which was trained on the same texts and knows nothing "
    "beside: what there is to gain there, the fuser itself has learned. Models that know different things are made "
    "for the occasion (phasewise/reproduce/knowers.py): of three layers each, with a fuser for each sharer.",
)  # fmt: skip
