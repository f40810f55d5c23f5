"""H2O: rows that have got the most attention so far stay, and the most recent ones."""

from __future__ import annotations

from phasewise.methods.evict.h2o import H2O
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRunning
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

HEAVY, RECENT, LOT, NEW = 0.1, 0.1, 32, 48


def budget(case: Case) -> int:
    """Rows per head that are left."""
    prompt = loads.prompt_rows(case)
    return int(HEAVY * prompt) + int(RECENT * prompt)


ON = Setting({"evict": f"h2o:heavy={HEAVY},recent={RECENT},lot={LOT}"})
ANY = Setting(objects={"evict": RandomRunning(H2O(HEAVY, RECENT, lot=LOT))})
SYSTEM = System(
    title="H2O",
    paper=Paper("H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", "2306.14048"),
    claim="a fifth of the KV, half of it the rows that have got the most attention and half the most recent ones, "
    "answers as well as all of it: up to 29 times the throughput of DeepSpeed and Accelerate, 3 times FlexGen's, and "
    "1.9 times less latency.",
    conditions=("OPT-6.7B and 30B, LLaMA and GPT-NeoX", "HELM and lm-eval-harness tasks: short prompts", "T4 and A100"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows per head and as many recent ones, the others drawn at random",
    line="a fifth of the KV answers as all of it: 1.9 times less latency",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("throughput against engines that offload",),
    counters=(
        Counter("KV bytes held while decoding", "(heavy + recent rows + those of the lot) x bytes of a row",
                lambda case: case.method.steps[-2].kv,
                lambda case: (budget(case) + (NEW - 2) % LOT) * case.row_bytes),
        Counter("most KV bytes held while decoding", "(heavy + recent rows + a lot - 1) x bytes of a row",
                lambda case: max(step.kv for step in case.method.decoding),
                lambda case: (budget(case) + LOT - 1) * case.row_bytes),
        Counter("KV bytes read while decoding", "what is held at each row; keys twice without kernels",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(budget(case) + (j - 1) % LOT + 1 for j in range(1, NEW)) * case.row_bytes
                * loads.halves_read() // 2),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY)),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
