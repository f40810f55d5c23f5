"""FSPAD: EAGLE's block with a token-gated input, and an output each for the guess and for the feature passed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType

from torch import Tensor

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.eagle import Eagle
from phasewise.methods.draft.fspad import FSPAD
from phasewise.methods.verify.match import Match
from phasewise.reproduce.aligned_heads import EAGLE
from phasewise.reproduce.controls import Control
from phasewise.reproduce.drafting_heads import DEPTH, LOAD, NODES, PASSES, TIMINGS, guessing, passes, verified
from phasewise.reproduce.play import LoadEntry, PlayedRun
from phasewise.reproduce.system import Case, Load, Paper, Saving, Setting, System
from phasewise.reproduce.workload import PromptSource
from phasewise.speculation.features import FeatureDrafter
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.folder import beside
from phasewise.verbs.host import Host
from phasewise.verbs.traits import Traits

WIDTH = 4
TREE = f"depth={DEPTH},width={WIDTH},nodes={NODES}"
TASKS = ("json", "arithmetic", "list", "copy")  # of LOAD, in its order, as many questions of each
HOT = 1.0


def code(temperature: float) -> Load:
    """Code that nobody was trained on, to go on with."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        return [LoadEntry(asked.code(64), 48, temperature=temperature) for _ in range(asked.size(16, 4))]

    return load


DRAWN = code(HOT)


def passes_on(task: str) -> Callable[[Case, PlayedRun], float]:
    """Passes of the model per token of the answers to a task of LOAD."""
    at = TASKS.index(task)

    def cost(case: Case, run: PlayedRun) -> float:
        each = len(run.requests) // len(TASKS)
        counts = [request.trace.counts for request in run.requests[at * each : (at + 1) * each]]
        return sum(map(len, counts)) / sum(map(sum, counts))

    return cost


@dataclass(frozen=True)
class BesideTheModel(Control):
    """draft: EAGLE's trees of guesses by the heads of EAGLE's first shape that lie beside the model."""

    of: Eagle

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> FeatureDrafter:
        return replace(self.of, heads=str(beside(host.model, EAGLE))).bind(host)


@dataclass(frozen=True)
class OneOutput(Control):
    """draft: FSPAD's guesses, of whose two outputs the guess's own is passed on as the feature as well."""

    of: FSPAD

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> FeatureDrafter:
        made = self.of.bind(host)
        heads = made.companion.model.heads
        heads.passed_on = MethodType(_guess_itself, heads)  # type: ignore[method-assign]
        return made


def _guess_itself(heads: FeatureHeads, output: Tensor) -> Tensor:
    return heads.final(output)


def drafting(heads: str = "auto") -> Setting:
    return Setting({"draft": f"fspad:heads={heads},{TREE}"}, most=1)


def by_trees(control: Control, model: str = "") -> Setting:
    return Setting(objects={"decode": Speculative(control, Match())}, most=1, model=model)


SYSTEM = System(
    title="FSPAD",
    paper=Paper("Boosting Lossless Speculative Decoding via Feature Sampling and Partial Alignment Distillation",
                "2408.15562"),
    claim="EAGLE-2's block, with an input that the token gates and with an output each for the guess and the feature, "
    "makes more tokens a pass and is faster than EAGLE-2 on all of six kinds of tasks, greedy and sampled.",
    conditions=("Vicuna 7B and 33B, Llama 3 8B and 70B, one request at a time", "a tree of 59 guesses, depth 5",
                "trained on ShareGPT, 20 epochs, as EAGLE-2 was", "greedy, and at T=1"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="heads of the same shape with random weights, as many guesses",
    line="a token-gated input, and outputs apart for guess and feature: better than EAGLE-2 on all tasks",
    promises=("cost", "time"),
    load=LOAD,
    rivals={
        "EAGLE's block without both changes, as many numbers, trained as long on the same texts":
            by_trees(BesideTheModel(Eagle(depth=DEPTH, width=WIDTH, nodes=NODES)), "pocket-eagle"),
    },
    exact=True,
    counters=(PASSES, verified(NODES), guessing(DEPTH)),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token of code, against the guess's own output passed on", passes, "control", 1.02,
               load=code(0.0), settings={"control": by_trees(OneOutput(FSPAD(depth=DEPTH, width=WIDTH, nodes=NODES)))}),
        *(Saving(f"passes per token, {task}", passes_on(task), "rivals", 1.0) for task in TASKS),
        Saving("passes per token of code at T=1", passes, "rivals", 1.0, load=DRAWN),
        Saving("passes per token of code at T=1", passes, "baseline", 1.1, load=DRAWN),
    ),
    timings=TIMINGS,
    note="Both learned 300,000 tokens that pocket wrote and was asked, by the same losses, from true states with the "
    "same noise. The paper's EAGLE has the same MLP as FSPAD, and so fewer numbers. A tree of 7 guesses, 4 in a row: "
    "rows cost time on a CPU.",
)  # fmt: skip
