"""Hydra: Medusa's heads that know the tokens guessed before their own."""

from __future__ import annotations

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.hydra import Hydra
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads
from phasewise.reproduce.drafting_heads import OthersPath, second_heads
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Attempt, Case, Counter, Paper, Saving, Setting, System, Timing

NODES = 15
MEDUSA = Setting({"draft": f"medusa:nodes={NODES}"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


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
    load=loads.answering("json", "arithmetic", "list", "copy", n=16),
    exact=True,
    missing=("the prefix layer of Hydra++",),
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("guesses verified", f"{NODES} a pass after the prompts'", lambda case: case.work.drafted,
                lambda case: NODES * (case.work.forwards - len(case.entries)), bound="at most"),
        Counter("passes that make the guesses", "none: heads read what the verdict leaves",
                lambda case: case.work.draft_forwards, lambda case: 0),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.02),
        Saving("passes per token, against plain decoding", passes, "baseline", 1.5,
               settings={"baseline": Setting(most=1)}),
        Saving("passes per token", passes, "control", 1.1),
    ),
    attempts=(
        Attempt("mechanism", "second guesses that are right where the first was, Hydra and Medusa after equal training",
                "more often than Medusa's, with no more numbers to learn", second_heads),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
    ),
    note="Both have four heads that share the model's output matrix. The maps of Hydra's are of a rank at which it has "
    "no more numbers than Medusa; both learn the model's own distributions, on the same text, for as many steps.",
)  # fmt: skip
