"""MTP: a whole layer behind the model, which guesses the token after the next."""

from __future__ import annotations

from phasewise.reproduce import sampled
from phasewise.reproduce.drafting_heads import LOAD, PASSES, TIMINGS, guessing, passes, verified
from phasewise.reproduce.system import Paper, Saving, Setting, System


def drafting(heads: str = "auto") -> Setting:
    return Setting({"draft": f"mtp:heads={heads},depth=1"}, most=1)


SYSTEM = System(
    title="MTP modules",
    paper=Paper("DeepSeek-V3 Technical Report", "2412.19437"),
    claim="a module of one layer, trained to foretell the token after the next, is right about 85 to 90 times in a "
    "hundred, which gives 1.8 times the tokens a second.",
    conditions=("one guess a pass", "671B weights in FP8, on many GPUs", "the module is trained with the model"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="a module of the same shape with random weights, as many guesses",
    line="a layer behind the model guesses the token after the next: 1.8 times as fast",
    promises=("cost", "time"),
    load=LOAD,
    rivals={
        "Medusa's first head, trained as long on the same texts": Setting({"draft": "medusa:nodes=1"}, most=1),
        "Hydra's first head, trained as long on the same texts": Setting({"draft": "hydra:nodes=1"}, most=1),
        "one guess copied from the text": Setting({"draft": "prompt_lookup:k=1"}, most=1),
    },
    exact=True,
    missing=("a module that was trained with the model",),
    counters=(PASSES, verified(1), guessing(1)),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("passes per token at T=0.7", passes, "baseline", 1.02, load=sampled.writing(0.7)),
    ),
    timings=TIMINGS,
    note="The module was trained afterwards, with the model frozen. It has one key head and an MLP half as wide as the "
    "model.",
)  # fmt: skip
