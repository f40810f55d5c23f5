"""SpecTr: several independent continuations by a small model, judged together."""

from __future__ import annotations

from torch import Tensor

from phasewise.bench import acceptance
from phasewise.reproduce import loads, sampled
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.sampled import draft, rounds
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Saving, Setting, System, Timing

CHAINS, K, TEMPERATURE = 4, 4, 1.0
SHARE = 1 - 1 / 2.718281828459045  # of the best possible acceptance, that the paper proves
LOAD = sampled.writing(TEMPERATURE)
ROWS = CHAINS * K  # that a verdict is over
RIVALS = {
    "the same chains, one after another": Setting(
        {"draft": draft("spectr", chains=CHAINS, k=K), "verify": "rejection"}, most=sampled.MOST
    ),
    "a tree without replacement": Setting({"draft": draft("rsd", beam=CHAINS, depth=K)}, most=sampled.MOST),
    "one long chain": Setting({"draft": draft("draft_model", k=ROWS)}, most=sampled.MOST),
}


def chains(model: str = "pocket-draft") -> Setting:
    return Setting({"draft": draft("spectr", model=model, chains=CHAINS, k=K), "verify": "k_seq"}, most=sampled.MOST)


def forms(p: Tensor, q: Tensor) -> tuple[float, ...]:
    """Accepted by K-SEQ; by recursive rejection; at best."""
    return (
        acceptance.together(p, q, CHAINS), acceptance.independent(p, q, CHAINS),
        acceptance.best_independent(p, q, CHAINS),
    )  # fmt: skip


def bound(lab: Lab) -> AttemptOutcome:
    """Round by round, on the models' own p and q."""
    seen = sampled.watch(lab, chains().verbs["draft"], "k_seq", forms, LOAD)
    ours, rejection, best = (sampled.mean(seen, form) for form in range(3))
    least = min(each.forms[0] / each.forms[2] for each in seen)
    words = f"{ours:.2%} of {best:.2%} (recursive rejection {rejection:.2%}); in no round less than {least:.1%} of it"
    return AttemptOutcome(least >= SHARE and ours <= best, words)


SYSTEM = System(
    title="SpecTr",
    paper=Paper("SpecTr: Fast Speculative Decoding via Optimal Transport", "2310.15141"),
    claim="several drafts drawn independently and judged by K-SEQ, which accepts at least 1 - 1/e of what is possible, "
    "make decoding 2.13 times as fast, 1.37 times as fast as one draft does.",
    conditions=("PaLM-2 with a small PaLM-2 as the draft", "LM1B, sampled", "8 drafts of 8 tokens"),
    method=chains(),
    baseline=Setting({"draft": draft("draft_model", k=K)}, most=sampled.MOST),
    control=chains("untrained-draft"),
    control_is="a draft of the same shape with random weights",
    line="several drafts judged together: 2.13 times as fast, 1.37 times one draft's speed",
    promises=("cost", "time"),
    load=LOAD,
    rivals=RIVALS,
    counters=(
        Counter("passes of the draft model", f"{K} a pass of the model at most", lambda case: case.work.draft_forwards,
                lambda case: K * case.work.forwards, bound="at most"),
        Counter("guesses verified", f"{CHAINS} chains of {K} a verdict at most", lambda case: case.work.drafted,
                lambda case: CHAINS * K * (case.work.emitted - case.work.accepted), bound="at most"),
    ),
    savings=(
        Saving("passes per token of a request", rounds, "baseline", 1.05),
        Saving("passes per token of a request", rounds, "rivals", sampled.BETTER),
        Saving("passes per token of a request", rounds, "control", 1.2),
    ),
    attempts=(
        Attempt("counter", "first guesses accepted, 1 - (1 - b)^k", sampled.EXPECTED,
                sampled.expected(chains().verbs["draft"], "k_seq", forms, LOAD)),
        Attempt("mechanism", "what K-SEQ accepts, and the best possible", f"at least {SHARE:.1%} of it in every round",
                bound),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        sampled.timing(TEMPERATURE, chains("pocket-draft-wide"), Setting(most=1), "plain decoding"),
        sampled.timing(TEMPERATURE, chains("pocket-draft-wide"),
                       Setting({"draft": draft("draft_model", model="pocket-draft-wide", k=K)}), "one chain"),
    ),
    note="The baseline is one chain of the same draft model, as long. The rivals are verified over as many rows. The "
    "best possible is the closed form of arXiv 2502.18779, over the p and q of all rounds.",
)  # fmt: skip
