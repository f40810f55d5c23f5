"""ZipVL, which drops: each layer of a prompt attends to its important tokens alone, and keeps no others."""

from __future__ import annotations

from phasewise.methods.evict.zipvl import ZipVL
from phasewise.reproduce import loads
from phasewise.reproduce.answers import right
from phasewise.reproduce.controls import RandomImportant
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Saving,
    Setting,
    System,
    Timing,
)

TAU, WINDOW, NEW = 0.9, 32, 32
SHARES = (0.7, 0.9, 0.975, 1.0)
METHOD = Setting({"evict": f"zipvl:tau={TAU},window={WINDOW},queries=all"})
BARE = Setting({"evict": f"zipvl:tau={TAU},window={WINDOW}"})


def held(run: PlayedRun) -> int:
    """KV bytes before the last token."""
    return run.steps[-2].kv


def stayed(case: Case) -> int:
    """Bytes of the prompt's rows that stay, in all layers, as they are when the first token is there."""
    return next(step.kv for step in case.method.steps if step.kv)


def over_shares(lab: Lab) -> AttemptOutcome:
    """Recall at several shares of attention."""
    n = lab.scale.examples or (6 if lab.scale.quick else 40)
    settings = [Setting({"evict": f"zipvl:tau={tau},queries=all"}) for tau in SHARES]
    found = [sum(right(lab, setting, "recall@1k", n)) / n for setting in settings]
    words = ", ".join(f"{share:.0%} at tau={tau:g}" for tau, share in zip(SHARES, found))
    return AttemptOutcome(found[-1] >= found[0], f"{words}, of {n}")


ANY = Setting(objects={"evict": RandomImportant(ZipVL(TAU, WINDOW, queries="all"))})
SYSTEM = System(
    title="ZipVL (text)",
    paper=Paper("ZipVL: Efficient Large Vision-Language Models with Dynamic Token Sparsification and KV Cache "
                "Compression", "2410.08584"),
    claim="the share of tokens that matter differs by layer and prompt; attention among them alone and their KV alone "
    "give 2.3 times faster prefill and 2.8 times the decoding throughput at 0.5 % less accuracy.",
    conditions=("LLaVA-Next-13B on VQAv2", "prompts that are mostly tokens of images"),
    method=METHOD,
    baseline=Setting(),
    control=ANY,
    control_is="as many tokens in every layer, the last ones among them, the others drawn at random",
    line="attention among tokens that matter: prefill 2.3 and decoding 2.8 times as fast, 0.5 % lost",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("images, which have more tokens to spare than text",),
    counters=(
        Counter("KV bytes held before the last token",
                "those of the prompt's important tokens + decoded rows x bytes of a row",
                lambda case: held(case.method), lambda case: stayed(case) + (NEW - 2) * case.row_bytes),
        Counter("KV bytes read for the prompt", "all keys once for the probes + the rows that stay",
                lambda case: case.method.steps[0].read,
                lambda case: loads.prompt_rows(case) * case.row_bytes // 2 + stayed(case)),
    ),
    savings=(Saving("KV bytes held before the last token", lambda case, run: held(run), "baseline", 1.3),),
    quality=long_texts(always(METHOD), always(ANY), beside={"queries of important tokens alone": always(BARE)}),
    attempts=(Attempt("mechanism", "recall@1k over the share of attention",
                      "no worse with all of it than with the least", over_shares),),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
