"""RLKV: the KV heads that answers hang on, found by reward, keep every row; the others sinks and a window."""

from __future__ import annotations

from phasewise.bench.stats import shares
from phasewise.methods.evict._windows import EVERY
from phasewise.methods.evict.rlkv import RLKV
from phasewise.reproduce import loads
from phasewise.reproduce.answers import right
from phasewise.reproduce.heads import OtherHeads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Paper,
    Setting,
    System,
    Timing,
)

METHOD = RLKV(share=0.5)
ON = Setting({"evict": f"rlkv:share={METHOD.share}"})
WIDER = Setting({"evict": f"rlkv:share={METHOD.share},sinks=128,window=256"})  # the paper's while it trained
TASKS, NEW, DRAWS = ("recall@1k", "passkey@1k"), 80, 3


def held(case: Case, rows: int) -> int:
    """KV bytes when so many rows are committed."""
    heads = case.config.layers * case.config.kv_heads
    cut, idle = round(METHOD.share * heads), (rows - loads.prompt_rows(case)) % EVERY
    return ((heads - cut) * rows + cut * (METHOD.sinks + METHOD.window - 1 + idle)) * case.row_bytes // heads


def read(case: Case) -> int:
    """Rows that every decoded token reads: those held, and its own."""
    prompt = loads.prompt_rows(case)
    return sum(held(case, rows) + case.row_bytes for rows in range(prompt, prompt + NEW - 1))


def any_heads(lab: Lab) -> AttemptOutcome:
    """Against as many heads drawn at random, several times; and with the window that the paper trained with."""
    n = lab.scale.examples or (6 if lab.scale.quick else 40)

    def grades(setting: Setting) -> list[float]:
        return [grade for task in TASKS for grade in right(lab, setting, task, n)]

    mine, wider = grades(ON), grades(WIDER)
    others = [grades(Setting(objects={"evict": OtherHeads(METHOD, "random", seed)})) for seed in range(DRAWS)]
    leads = shares(mine * DRAWS, [grade for each in others for grade in each])
    words = ", ".join(f"{sum(each) / len(each):.0%}" for each in others)
    own, far = (sum(each) / len(each) for each in (mine, wider))
    return AttemptOutcome(
        leads.low > 0, f"{leads.text(True)} ({own:.0%}; random {words}; with 128 + 256 rows {far:.0%})"
    )


ANY = Setting(objects={"evict": OtherHeads(METHOD)})
SYSTEM = System(
    title="RLKV",
    paper=Paper("Which Heads Matter for Reasoning? RL-Guided KV Cache Compression", "2510.08525"),
    claim="a gate for each KV head, learned by reward, tells the heads that reasoning needs; the others keep 16 sinks "
    "and the last 64 rows: 20 to 50 % of the cache at almost no loss, and 1.8 times the throughput from end to end.",
    conditions=("Llama-3.1-8B-R1 and Qwen models that reason in thousands of tokens", "GSM8K, Math500, AIME24",
                "SGLang on one A100"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many heads, those whose gates are highest: the gates reversed",
    line="heads found by reward keep all rows: 20 to 50 % less cache at no loss, 1.8 times the throughput",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("long reasoning, in which dropped rows may lead to repetition and longer answers",),
    counters=(
        Counter("KV bytes held before the last token",
                "full heads x rows + cut heads x (sinks + window - 1 + rows that lie idle)",
                lambda case: case.method.steps[-2].kv,
                lambda case: held(case, loads.prompt_rows(case) + NEW - 2)),
        Counter("KV bytes read while decoding", "the same, and the row itself, for every token",
                lambda case: sum(step.read for step in case.method.decoding), read),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY), stranger=False),
    attempts=(
        Attempt("control", f"right answers, less those with as many heads drawn at random ({DRAWS} times)",
                "all of it above 0", any_heads, "answers", "pocket"),
    ),
    timings=(Timing("time per token at 1,024 tokens", 1.0, tokens=1024),),
    note="The gates were trained by `phasewise train artefact evict.rlkv`, on fresh draws of the training mixture's "
    "long tasks; the share of heads is the paper's. The pocket model has 16 KV heads.",
)  # fmt: skip
