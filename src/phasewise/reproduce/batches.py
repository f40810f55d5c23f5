"""Bytes saved as a larger batch: how many requests a fixed KV budget holds at once, and tokens per second of all of
them."""

from __future__ import annotations

from functools import partial

from phasewise.bench.drive import Bench
from phasewise.bench.fitting import FullBatch, fitting
from phasewise.bench.rounds import Ratio, order, ratio
from phasewise.bench.savers import PROMPTS_FIRST
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.system import Attempt, AttemptOutcome, Setting

TOKENS, NEW, DENSE = 1000, 24, 4  # of a prompt, of an answer; and the whole requests that the budget holds
OFFERED = 5  # times as many


def engine_of(bench: Bench, setting: Setting, budget: int, most: int) -> Engine:
    """An engine of this setting within `budget` bytes of KV, at most so many requests at once."""
    limits = Limits(kv_bytes=budget, max_running=most, prefix_cache=False)
    found = bench.engine({**PROMPTS_FIRST, **setting.verbs}, limits)
    assert isinstance(found, Engine), "settings of one engine"
    return found


def beside(lab: Lab, setting: Setting, rounds: int) -> list[dict[str, FullBatch]]:
    """Per round what the method and dense decoding fit, both with the same prompts and budget, in rotating order."""
    bench = Bench(lab.model("pocket"))
    who = {"method": setting, "dense": Setting()}
    tokens = lab.asked("pocket").size(TOKENS, 128)
    budget = DENSE * engine_of(bench, Setting(), 1 << 40, 1).recipes[""].need(tokens + NEW)
    found = []
    for number in range(rounds):
        asked = lab.asked("pocket", number)
        prompts = [asked.random(tokens) for _ in range(OFFERED * DENSE)]
        found.append({
            name: fitting(engine_of(bench, who[name], budget, len(prompts)), prompts, NEW)
            for name in order(list(who), number)
        })  # fmt: skip
    return found


def larger(lab: Lab, setting: Setting, least: float) -> AttemptOutcome:
    """Checks that `least` times as many requests decode at once."""
    (one,) = beside(lab, setting, 1)
    ours, theirs = one["method"].most, one["dense"].most
    return AttemptOutcome(ours >= least * theirs, f"{ours} against {theirs} ({ours / theirs:.2f} times)")


def faster(lab: Lab, setting: Setting) -> AttemptOutcome:
    """Checks that the larger batch makes more tokens a second, in every round."""
    gain = throughput(beside(lab, setting, lab.scale.rounds))
    if gain is None:
        return AttemptOutcome(None, "in no round had both a step of their largest batch alone")
    return AttemptOutcome(gain.low > 1, f"{gain} times in {gain.n} rounds")


def throughput(rounds: list[dict[str, FullBatch]]) -> Ratio | None:
    """Tokens per second of the method's largest batch over those of dense's, paired by round."""
    made = {
        name: {n: speed for n, one in enumerate(rounds) if (speed := one[name].tokens_per_s) is not None}
        for name in ("method", "dense")
    }
    return ratio(made["method"], made["dense"])


def attempts(setting: Setting, least: float) -> tuple[Attempt, Attempt]:
    """Both questions, of a method that is named as on the command line."""
    where = f"in the bytes of {DENSE} whole requests of {TOKENS:,} tokens"
    return (
        Attempt("cost", f"requests that decode at once {where}", f"at least {least:g} times as many",
                partial(larger, setting=setting, least=least)),
        Attempt("time", f"tokens per second of the largest batch {where}, over dense's", "above 1 in every round",
                partial(faster, setting=setting)),
    )  # fmt: skip
