"""Speculative decoding with a small model of the same vocabulary."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Saving, Setting, System, Timing

K = 4


def drafting(model: str) -> Setting:
    return Setting({"draft": f"draft_model:model={model},k={K}"}, most=1)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def chains(case: Case) -> list[int]:
    """Tokens of every pass whose draft was as long as it may be."""
    found = []
    for request in case.method.requests:
        known = 1  # after the prompt's pass
        for count in request.trace.counts[1:]:
            if request.params.max_tokens - known > K:
                found.append(count)
            known += count
    return found


def mean_chain(case: Case) -> float:
    return sum(chains(case)) / len(chains(case))


def expected(case: Case) -> float:
    """(1 - a^(k + 1)) / (1 - a), a being the share of guesses that hold once all before them do."""
    found = chains(case)
    right, wrong = sum(n - 1 for n in found), sum(n <= K for n in found)
    a = right / (right + wrong)
    return float(sum(a**i for i in range(K + 1)))


SYSTEM = System(
    title="Speculative decoding with a draft model",
    paper=Paper("Fast Inference from Transformers via Speculative Decoding", "2211.17192"),
    claim="a small model's guesses, verified in one pass, give the large model's tokens sooner: 2.28 tokens per pass, "
    "1.52 times the speed (Spec-Bench, Vicuna-7B with a draft of 68M weights, greedy, A100).",
    conditions=("a draft with a hundredth of the target's weights", "one request at a time, fp16",
                "text that the draft was trained for"),
    method=drafting("pocket-draft"),
    baseline=Setting(most=1),
    control=drafting("untrained-draft"),
    control_is="a draft of the same shape with random weights",
    line="a small model guesses, the large one verifies: 1.52 times as fast, the same tokens",
    promises=("cost", "time"),
    load=loads.answering("json", "arithmetic", "list", n=16),
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("tokens per whole pass", "(1 - a^(k + 1)) / (1 - a) at the acceptance measured", mean_chain, expected,
                within=0.1),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", 1.5),
        Saving("passes per token", passes, "control", 1.2),
    ),
    timings=(
        Timing("time per token", seconds=loads.pace, price=True),
        Timing("time per token, both models padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide",
               settings={"method": drafting("pocket-draft-wide")}),
    ),
    note="The pocket draft has a fifth of the target's weights, not a hundredth, and saw a tenth of its training. The "
    "clock that is judged is that of both models padded alike; the small ones, shown beside it, spend much of a pass "
    "on what no drafter saves.",
)  # fmt: skip
