"""TOVA: the row that the last query needs least leaves."""

from __future__ import annotations

from phasewise.methods.evict.tova import Tova
from phasewise.reproduce import loads
from phasewise.reproduce.controls import RandomRunning
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

KEEP, LOT, NEW = 0.25, 32, 48


def budget(case: Case) -> int:
    """Rows per layer that are left."""
    return int(KEEP * loads.prompt_rows(case))


ON = Setting({"evict": f"tova:keep={KEEP},lot={LOT}"})
ANY = Setting(objects={"evict": RandomRunning(Tova(KEEP, lot=LOT))})
SYSTEM = System(
    title="TOVA",
    paper=Paper("Transformers are Multi-State RNNs", "2401.06104"),
    claim="with an eighth to a quarter of the rows, those that the last query attends to, long texts are modelled and "
    "understood nearly as with all of them: 4.8 times the throughput.",
    conditions=("LLaMA-2, Mistral and Yi, 7B", "PG-19 perplexity, SQuALITY, QASPER and stories", "contexts of 4K"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows per layer, drawn at random",
    line="the row needed least leaves: a quarter of the rows, nearly equal answers, 4.8 times the throughput",
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
    quality=long_texts(always(ON), always(ANY)),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
