"""Recursive speculative decoding: a tree whose siblings are drawn without replacement."""

from __future__ import annotations

from torch import Tensor

from phasewise.bench import acceptance
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.sampled import draft, rounds
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Saving, Setting, System, Timing

BEAM, DEPTH, TEMPERATURE = 6, 4, 1.0
LOAD = sampled.writing(TEMPERATURE)


def beam(model: str = "pocket-draft") -> Setting:
    return Setting({"draft": draft("rsd", model=model, beam=BEAM, depth=DEPTH)}, most=sampled.MOST)


def forms(p: Tensor, q: Tensor) -> tuple[float, ...]:
    """Accepted of two distinct guesses; of two independent ones; of one."""
    return acceptance.two_distinct(p, q), acceptance.independent(p, q, 2), acceptance.single(p, q)


ROWS = BEAM * DEPTH  # of a tree
RIVALS = {
    "six independent chains": Setting(
        {"draft": draft("spectr", chains=BEAM, k=DEPTH), "verify": "rejection"}, most=sampled.MOST
    ),
    "six chains judged by K-SEQ": Setting(
        {"draft": draft("spectr", chains=BEAM, k=DEPTH), "verify": "k_seq"}, most=sampled.MOST
    ),
    "one long chain": Setting({"draft": draft("draft_model", k=ROWS)}, most=sampled.MOST),
}
PAIR = draft("rsd", beam=0, widths="2x1")


def distinct(lab: Lab) -> AttemptOutcome:
    """Round by round, on the models' own p and q."""
    seen = sampled.watch(lab, PAIR, "rejection", forms, LOAD)
    ours, independent, one = (sampled.mean(seen, form) for form in range(3))
    never = all(each.forms[0] >= each.forms[1] - 1e-9 for each in seen)
    words = f"{ours:.2%} without replacement, {independent:.2%} with it, {one:.2%} of one guess"
    return AttemptOutcome(ours > independent > one, words + ("; nowhere less" if never else "; less in some rounds"))


SYSTEM = System(
    title="Recursive speculative decoding",
    paper=Paper("Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement",
                "2402.14160"),
    claim="trees drawn without replacement beat one draft, and trees drawn with replacement, always at the same length "
    "and mostly for the same work of the target (numbers in figures only).",
    conditions=("Llama 2 and OPT with small drafts", "sampled"),
    method=beam(),
    baseline=Setting({"draft": draft("draft_model", k=DEPTH)}, most=sampled.MOST),
    control=beam("untrained-draft"),
    control_is="a draft of the same shape with random weights",
    line="trees drawn without replacement beat chains and trees with replacement of the same work",
    promises=("cost", "time"),
    load=LOAD,
    rivals=RIVALS,
    counters=(
        Counter("passes of the draft model", f"one a level: {DEPTH} a pass of the model at most",
                lambda case: case.work.draft_forwards, lambda case: DEPTH * case.work.forwards, bound="at most"),
        Counter("guesses verified", f"{BEAM} a level and verdict at most", lambda case: case.work.drafted,
                lambda case: BEAM * DEPTH * (case.work.emitted - case.work.accepted), bound="at most"),
    ),
    savings=(
        Saving("passes per token of a request", rounds, "baseline", 1.1),
        Saving("passes per token of a request", rounds, "rivals", sampled.BETTER),
        Saving("passes per token of a request", rounds, "control", 1.2),
    ),
    attempts=(
        Attempt("counter", "first guesses accepted of two drawn without replacement", sampled.EXPECTED,
                sampled.expected(PAIR, "rejection", forms, LOAD)),
        Attempt("mechanism", "two guesses: what is accepted on average",
                "more without replacement than with it, and more than of one", distinct),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        sampled.timing(TEMPERATURE, beam("pocket-draft-wide"), Setting(most=1), "plain decoding"),
        sampled.timing(TEMPERATURE, beam("pocket-draft-wide"),
                       Setting({"draft": draft("draft_model", model="pocket-draft-wide", k=DEPTH)}), "one chain"),
    ),
    note="The baseline is a chain as long as the tree is deep. The rivals are verified over as many rows as the tree: "
    "independent chains, and one chain, which asks the draft model six times as often.",
)  # fmt: skip
