"""Hidden Transfer: linear maps in the middle of the model make pseudo hidden states of later tokens, which guess in the
verify pass itself."""

from __future__ import annotations

from phasewise.reproduce import sampled
from phasewise.reproduce.drafting_heads import LOAD, NODES, PASSES, TIMINGS, passes, verified
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System

GUESSES = 3  # of a tree; with their pseudo rows they are 16 rows of the upper layers
MEDUSA = Setting({"draft": f"medusa:nodes={NODES}"}, most=1)
SKIPPING = Setting({"draft": "swift:branches=1"}, most=1)


def drafting(heads: str = "auto", **verbs: str) -> Setting:
    return Setting({"draft": f"hidden_transfer:heads={heads},nodes={GUESSES}", **verbs}, most=1)


def read(case: Case, run: PlayedRun) -> float:
    """Layers whose weights are read per token after a request's first: those of verdicts, and of what drafts beside
    them. Of a verdict that begins behind the first layers, these are counted with the drafts."""
    work, n = run.work, len(run.requests)
    begun = work.draft_depth if run is case.method else 0
    return ((work.forwards - n) * case.config.layers - begun + work.draft_depth) / (work.emitted - n)


SYSTEM = System(
    title="Hidden Transfer",
    paper=Paper("Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration", "2404.12022"),
    claim="linear maps between two layers make pseudo hidden states of several later tokens, which the other layers "
    "refine in the same pass: faster than Medusa and self-speculative decoding, the other ways with a single model "
    "(figures only in its tables).",
    conditions=("LLaMA-2-Chat and Vicuna, 7B and 13B", "tree verification in the same pass", "one request at a time"),
    method=drafting(),
    baseline=Setting(most=1),
    control=drafting("random:0"),
    control_is="maps of the same shape with random weights, as many guesses",
    line="pseudo hidden states from the middle of the model guess in no pass: better than Medusa",
    promises=("cost", "time"),
    load=LOAD,
    rivals={"Medusa's heads, twice as many guesses, trained as long on the same texts": MEDUSA},
    exact=True,
    counters=(
        PASSES, verified(GUESSES),
        Counter("passes of the first layers", "one for each verdict, which begins behind them",
                lambda case: case.work.draft_forwards, lambda case: case.work.forwards - len(case.entries),
                bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.3),
        Saving("passes per token", passes, "rivals", 1.0),
        Saving("passes per token", passes, "control", 1.2),
        Saving("layers read per token, against self-speculation by leaving sub-layers out", read, "baseline", 1.0,
               settings={"baseline": SKIPPING}),
        Saving("passes per token at T=0.7", passes, "baseline", 1.02, load=sampled.writing(0.7)),
    ),
    timings=TIMINGS,
    note="The abstract gives no number. The maps stand in the middle of pocket's eight layers; what is verified beside "
    "them are 3 guesses, and a pseudo row costs half a row.",
)  # fmt: skip
