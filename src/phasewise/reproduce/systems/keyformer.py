"""Keyformer: accumulated weights of noisy, tempered logits choose the key rows, and recent ones stay."""

from __future__ import annotations

from phasewise.methods.evict.keyformer import Keyformer
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRunning
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

KEEP, RECENT, LOT, NEW = 0.5, 0.3, 32, 48


def budget(case: Case) -> int:
    """Rows per head that are left."""
    return int(KEEP * loads.prompt_rows(case))


ON = Setting({"evict": f"keyformer:keep={KEEP},recent={RECENT},lot={LOT}"})
HEAVY = Setting(
    {"evict": f"h2o:heavy={KEEP * (1 - RECENT):g},recent={KEEP * RECENT:g},lot={LOT}"}
)  # as many rows of either kind
ANY = Setting(objects={"evict": RandomRunning(Keyformer(KEEP, RECENT, lot=LOT))})
SYSTEM = System(
    title="Keyformer",
    paper=Paper("Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference",
                "2403.09054"),
    claim="half of the KV, chosen by scores that noise and temperature keep from being sure too early, gives the "
    "answers of all of it at long contexts, and better ones than H2O (70 % of it in summaries, 90 % in conversation): "
    "2.1 times less latency, 2.4 times the throughput.",
    conditions=("GPT-J, Cerebras-GPT and MPT, 6B and 7B", "summaries, conversation, few-shot tasks", "one A100"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows per head and as many recent ones, the others drawn at random",
    line="half of the KV, by noisy scores, answers as all of it and better than H2O's: 2.1 times less latency",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes held while decoding", "(keep x prompt + rows of the lot) x bytes of a row",
                lambda case: case.method.steps[-2].kv,
                lambda case: (budget(case) + (NEW - 2) % LOT) * case.row_bytes),
        Counter("most KV bytes held while decoding", "(keep x prompt + a lot - 1) x bytes of a row",
                lambda case: max(step.kv for step in case.method.decoding),
                lambda case: (budget(case) + LOT - 1) * case.row_bytes),
        Counter("KV bytes read while decoding", "what is held at each row; keys twice without kernels",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(budget(case) + (j - 1) % LOT + 1 for j in range(1, NEW)) * case.row_bytes
                * loads.halves_read() // 2),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY), rivals={"H2O": always(HEAVY)}),
    timings=(Timing("time per token at 2,048 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=2048),),
)  # fmt: skip
