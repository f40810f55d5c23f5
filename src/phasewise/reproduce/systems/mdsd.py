"""Optimal multi-draft speculative decoding: how much can be accepted, and guesses that reach it."""

from __future__ import annotations

from torch import Tensor

from phasewise.bench import acceptance
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.sampled import draft, rounds
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Saving, Setting, System, Timing

GUESSES, TEMPERATURE = 4, 0.6
LOAD = sampled.writing(TEMPERATURE)


def drafting(drawn: str, model: str = "pocket-draft") -> Setting:
    return Setting({"draft": draft("draft_model", model=model, k=1, branches=GUESSES, drawn=drawn)}, most=sampled.MOST)


RIVALS = {
    "guesses without replacement": Setting({"draft": draft("rsd", beam=0, widths=GUESSES)}, most=sampled.MOST),
    "independent guesses judged by K-SEQ": Setting(
        {"draft": draft("spectr", chains=GUESSES, k=1), "verify": "k_seq"}, most=sampled.MOST
    ),
}


def reached(p: Tensor, q: Tensor) -> tuple[float, ...]:
    return (acceptance.top_plus_one(p, q, GUESSES),)


def rules(p: Tensor, q: Tensor) -> tuple[float, ...]:
    """Acceptance of two guesses: of top and one, of two distinct and of two independent ones by either rule; then
    the best possible for distinct and for independent ones."""
    return (
        acceptance.top_plus_one(p, q, 2), acceptance.two_distinct(p, q), acceptance.independent(p, q, 2),
        acceptance.together(p, q, 2), acceptance.best_two_distinct(p, q), acceptance.best_independent(p, q, 2),
    )  # fmt: skip


def bounds(lab: Lab) -> AttemptOutcome:
    """On the models' own p and q, without drawing a number."""
    seen = sampled.watch(lab, draft("draft_model", k=1, branches=2, drawn="top_plus_one"), "rejection", rules, LOAD)
    chosen, distinct, independent, together, best, least = (sampled.mean(seen, form) for form in range(6))
    kept = all(e.forms[1] <= e.forms[4] + 1e-9 and max(e.forms[2:4]) <= e.forms[5] + 1e-9 for e in seen)
    words = (
        f"without replacement {distinct:.2%} of {best:.2%}, with replacement {independent:.2%} (k_seq {together:.2%}) "
        f"of {least:.2%}, top and one {chosen:.2%}"
    )
    return AttemptOutcome(kept and distinct < best and independent <= together < least and chosen >= distinct, words)


SYSTEM = System(
    title="Optimal multi-draft speculative decoding",
    paper=Paper("Towards Optimal Multi-draft Speculative Decoding", "2502.18779"),
    claim="what can be accepted of several guesses is computed for whole vocabularies; verifiers in use stay 0.1 to "
    "3.3 points below it, and the likeliest tokens with one drawn from the others reach their own.",
    conditions=("OPT, LLaMA and Vicuna, 6.7B and 7B, with small or EAGLE drafters", "several guesses a token, sampled"),
    method=drafting("top_plus_one"),
    baseline=drafting("iid"),
    control=drafting("top_plus_one", "untrained-draft"),
    control_is="a draft of the same shape with random weights",
    line="the likeliest guesses and one drawn beat independent ones: up to the best possible acceptance",
    promises=("cost",),
    load=LOAD,
    rivals=RIVALS,
    counters=(
        Counter("passes of the draft model", "one a pass of the model at most", lambda case: case.work.draft_forwards,
                lambda case: case.work.forwards, bound="at most"),
    ),
    savings=(
        Saving("passes per token of a request", rounds, "baseline", 1.02),
        Saving("passes per token of a request", rounds, "rivals", sampled.BETTER),
        Saving("passes per token of a request", rounds, "control", 1.2),
    ),
    attempts=(
        Attempt("counter", "first guesses accepted, p(top) + the sum of min(p, q') over the others", sampled.EXPECTED,
                sampled.expected(drafting("top_plus_one").verbs["draft"], "rejection", reached, LOAD)),
        Attempt("mechanism", "two guesses: what verifiers accept, and the best possible",
                "each at most its bound, top and one at least as much as the others", bounds),
    ),
    timings=(Timing("time per token", seconds=loads.pace, price=True),),
    note="The baseline draws as many guesses independently. So do the rivals, with another draw or another verifier. "
    "All ask the draft model once a pass. Bounds are closed forms over the p and q of all rounds; tests hold them "
    "against a linear program.",
)  # fmt: skip
