"""KV Prediction: a small model reads the prompt, and the model's keys and values are predicted from what it cached."""

from __future__ import annotations

from math import prod

from phasewise.bench.stats import means, shares
from phasewise.methods.decode._second import config_of
from phasewise.methods.decode.kv_prediction import KVPrediction
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import shapes
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses, right
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Quality,
    Saving,
    Setting,
    System,
    Timing,
)

PROMPT, NEW = 1024, 8
AUX = KVPrediction().model
METHOD, ALONE = Setting({"decode": "kv_prediction"}), Setting(model=AUX)
DRAWN = Setting({"decode": "kv_prediction:weights=random:0"})
TASKS = ("recall@1k", "passkey@1k")
CODE = Quality(("code",), allowed=0.05, examples=24, window=512, given=384)
EACH = 30  # examples of a task


def row_work(config: ModelConfig) -> int:
    """Products of numbers for a row in the linear layers of a model."""
    sizes = shapes(config, range(config.layers), 1)
    return sum(prod(sizes[name][1:]) * sizes[f"{name[:-1]}b"][0] for name in sizes if name.endswith(".a"))


def products(config: ModelConfig, aux: ModelConfig, computed: int, predicted: int) -> int:
    """Work of a prompt: the rows that the model computes, and of those that are predicted the auxiliary's and the
    maps'."""
    maps = 2 * config.layers * config.kv_heads * config.head_dim * aux.kv_heads * aux.head_dim
    return computed * row_work(config) + predicted * (row_work(aux) + maps)


def work(case: Case, run: PlayedRun) -> int:
    return products(case.config, config_of(AUX), run.work.prompt_rows, run.work.recalled)


def less_loss(lab: Lab) -> AttemptOutcome:
    """A smaller loss behind a prompt than the auxiliary has by itself, in whose time to the first token it comes."""
    n = min(lab.scale.examples or CODE.examples, 4 if lab.scale.quick else CODE.examples)
    gain = means(*(losses(lab, each, CODE, n) for each in (METHOD, ALONE)))
    return AttemptOutcome(gain.low > 0, f"log-likelihood {gain.text(False)}")


def more_answers(lab: Lab) -> AttemptOutcome:
    """More right answers than the auxiliary gives by itself."""
    n = min(lab.scale.examples or EACH, 6 if lab.scale.quick else EACH)
    mine, alone = ([g for task in TASKS for g in right(lab, each, task, n)] for each in (METHOD, ALONE))
    gain = shares(mine, alone)
    return AttemptOutcome(gain.low > 0, gain.text(True))


SYSTEM = System(
    title="KV Prediction",
    paper=Paper("KV Prediction for Improved Time to First Token", "2410.08391"),
    claim="for as much work before the first token, answers are 15 to 50 % (relative) better on TriviaQA and up to "
    "30 % on HumanEval than those of a smaller model, and the time to the first token falls on a CPU as the work does.",
    conditions=("OpenELM 1.1B and 3B with auxiliaries of 270M and more, all weights of which are trained",
                "70,000 steps of 2M tokens", "an M2 Pro"),
    method=METHOD,
    baseline=Setting(),
    control=DRAWN,
    control_is="maps and an auxiliary from which nothing was learned: random weights of the same shapes",
    load=loads.lone(PROMPT, NEW),
    missing=("auxiliaries made of the model's own layers",),
    counters=(
        Counter("rows of the prompt that the model computes", "1",
                lambda case: case.work.prompt_rows, lambda case: 1),
        Counter("rows that are predicted", "all others",
                lambda case: case.work.recalled, lambda case: loads.prompt_rows(case) - 1),
        Counter("passes of the auxiliary", "one for each 512 of these",
                lambda case: case.work.draft_forwards, lambda case: -(-(loads.prompt_rows(case) - 1) // 512)),
    ),
    savings=(Saving("products in linear layers before the first token", work, "baseline", 3.0),),
    quality=CODE,
    attempts=(
        Attempt("claim", "loss of code behind 384 tokens, method less the auxiliary alone", "all of it above 0",
                less_loss),
        Attempt("claim", f"right answers ({', '.join(TASKS)}), method less the auxiliary alone", "all of it above 0",
                more_answers),
    ),
    timings=(Timing("seconds to the first token of 1,792 tokens (random weights)", 1.5, seconds=loads.per_token,
                    load=loads.lone(1792, 1), settings={"method": DRAWN}),),
    note="The auxiliary of the pocket model is pocket-draft, of which low-rank weights are trained with the maps: "
    "`phasewise train artefact decode.kv_prediction`.",
)  # fmt: skip
