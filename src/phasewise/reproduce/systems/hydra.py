"""Hydra: Medusa's heads that know the tokens guessed before their own."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.hydra import Hydra
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads
from phasewise.reproduce.drafting_heads import (
    FREE,
    LOAD,
    NODES,
    PASSES,
    TIMINGS,
    OthersPath,
    passes,
    second_heads,
    verified,
)  # fmt: skip
from phasewise.reproduce.system import Attempt, Paper, Saving, Setting, System, Timing

MEDUSA = Setting({"draft": f"medusa:nodes={NODES}"}, most=1)

SYSTEM = System(
    title="Hydra",
    paper=Paper("Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", "2402.05109"),
    claim="draft heads that also read the embeddings of the tokens guessed before theirs are right more often than "
    "Medusa's: Hydra++ has 1.31 times Medusa's throughput and 2.71 times that of plain decoding (Vicuna, batch 1).",
    conditions=("four heads, Medusa's tree of 63 guesses", "Vicuna 7B to 33B in fp16, MT-Bench",
                "Hydra++ adds a prefix layer and deeper heads, trained on the model's own distributions"),
    method=Setting({"draft": f"hydra:nodes={NODES}"}, most=1),
    baseline=MEDUSA,
    control=Setting(objects={"decode": Speculative(OthersPath(Hydra(nodes=NODES)), Match())}, most=1),
    control_is="the same heads reading random tokens in place of those guessed before",
    line="draft heads that know the guesses before theirs: 1.31 times Medusa's throughput",
    promises=("cost", "time"),
    load=LOAD,
    exact=True,
    missing=("the prefix layer of Hydra++",),
    counters=(PASSES, verified(NODES), FREE),
    savings=(
        Saving("passes per token", passes, "baseline", 1.02),
        Saving("passes per token, against plain decoding", passes, "baseline", 1.5,
               settings={"baseline": Setting(most=1)}),
        Saving("passes per token", passes, "control", 1.05),
    ),
    attempts=(
        Attempt("mechanism", "second guesses that are right where the first was, Hydra and Medusa after equal training",
                "more often than Medusa's, with no more numbers to learn", second_heads),
    ),
    timings=(
        *TIMINGS,
        Timing("time per token, the model padded to sixteen times the weights, against plain decoding", 1.0,
               loads.pace, model="pocket-wide", settings={"baseline": Setting(most=1)}),
    ),
    note="Both have four heads that share the model's output matrix. The maps of Hydra's are of a rank at which it has "
    "no more numbers than Medusa; both learn the model's own distributions, on the same text, for as many steps.",
)  # fmt: skip
