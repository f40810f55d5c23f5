"""KV Prediction: a small model reads the prompt, and the model's keys and values are predicted from what it cached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from phasewise.methods.decode._second import Rows
from phasewise.methods.decode.kv_prediction import KVPrediction, Maps, Predicting
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import shapes
from phasewise.model.pruned import pruned
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control, drawn
from phasewise.reproduce.headroom import SEVERAL
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Quality, Setting, System, Timing
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

PROMPT, NEW = 1024, 8
OWN = KVPrediction(model="own:0.5")  # every second layer of the model's own reads the prompt
METHOD = Setting({"decode": "kv_prediction:model=own:0.5"})
DRAWN = Setting({"decode": "kv_prediction:model=own:0.5,weights=random:0"})
RIVALS = {
    "a smaller model": Setting(model="pocket-draft"),
    "KV predicted from a smaller model": Setting({"decode": "kv_prediction"}),
}
CODE = Quality(("code",), allowed=0.05, examples=24, window=512, given=384)


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
    aux = pruned(case.config, OWN.kept(case.config.layers))
    return products(case.config, aux, run.work.prompt_rows, run.work.recalled)


@dataclass(frozen=True)
class PermutedValues(Control):
    """decode: the same maps, and the values of the prompt's rows in an order drawn at random; keys stay."""

    of: KVPrediction

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Predicting:
        made = self.of.bind(host)
        made.maps = _Permuted(made.maps)  # type: ignore[assignment]
        return made


class _Permuted:
    def __init__(self, maps: Maps) -> None:
        self.maps = maps

    def __call__(self, rows: Rows, start: int) -> Rows:
        count = rows[0][0].shape[1]
        places = torch.randperm(count, generator=drawn("kv_prediction", start, count))
        return [(k, v[:, places]) for k, v in self.maps(rows, start)]


SYSTEM = System(
    title="KV Prediction",
    paper=Paper("KV Prediction for Improved Time to First Token", "2410.08391"),
    claim="for as much work before the first token, answers are 15 to 50 % (relative) better on TriviaQA and up to "
    "30 % on HumanEval than those of a smaller model, and the time to the first token falls on a CPU as the work does.",
    conditions=("OpenELM 1.1B and 3B with auxiliaries of 270M and more, all weights of which are trained",
                "70,000 steps of 2M tokens", "an M2 Pro"),
    method=METHOD,
    baseline=Setting(),
    control=Setting(objects={"decode": PermutedValues(OWN)}),
    control_is="the same maps and the same work, but the predicted values of the prompt's rows lie in an order drawn "
    "at random",
    line="the KV predicted from a small model's: better answers than its own for the same work, a faster first token",
    promises=("answers", "cost", "time"),
    load=loads.lone(PROMPT, NEW),
    missing=("an auxiliary all weights of which are trained",),
    counters=(
        Counter("rows of the prompt that the model computes", "1",
                lambda case: case.work.prompt_rows, lambda case: 1),
        Counter("rows that are predicted", "all others",
                lambda case: case.work.recalled, lambda case: loads.prompt_rows(case) - 1),
        Counter("passes of the auxiliary", "one for each 512 of these",
                lambda case: case.work.draft_forwards, lambda case: -(-(loads.prompt_rows(case) - 1) // 512)),
        Counter("attentions of the auxiliary that wait for one another",
                "half as many as the model has, for each 512 rows that are predicted",
                lambda case: case.work.draft_depth,
                lambda case: case.config.layers // 2 * -(-(loads.prompt_rows(case) - 1) // 512)),
    ),
    arithmetic=(KnobRatio("products in linear layers before the first token", work),),
    quality=(
        replace(CODE, allowed=None, rivals=RIVALS),
        Quality((SEVERAL,), None, 40, temperature=1.0, rivals=RIVALS),
    ),
    timings=(Timing("seconds to the first token of 1,792 tokens (random weights)", 1.5, seconds=loads.per_token,
                    load=loads.lone(1792, 1), settings={"method": DRAWN}),),
    note="The auxiliary is every second layer of pocket, with low-rank weights that are trained with the maps "
    "(`phasewise train artefact decode.kv_prediction:model=own:0.5`). The smaller model is pocket-draft, alone and as "
    "the auxiliary.",
)  # fmt: skip
