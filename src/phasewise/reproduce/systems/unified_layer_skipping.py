"""Unified Layer Skipping: the same evenly spread layers for every generated token."""

from __future__ import annotations

from phasewise import catalog
from phasewise.methods.skip.unified import kept
from phasewise.reproduce import loads
from phasewise.reproduce.controls import OtherLayers
from phasewise.reproduce.panel import short_texts
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

SPEEDUP, PROMPT, NEW = 2, 256, 48
TRAINED = "weights" in catalog.knobs_of(catalog.method("skip", "unified"))
UNTRAINED = Setting({"skip": f"unified:speedup={SPEEDUP},weights=none"})
OTHERS = Setting(objects={"skip": OtherLayers(SPEEDUP)})


def runs(case: Case) -> int:
    """Layers that a decoded row runs."""
    return len(kept(case.config.layers, SPEEDUP))


SYSTEM = System(
    title="Unified Layer Skipping",
    paper=Paper("Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy", "2404.06954"),
    claim="a fixed share of evenly spread layers, fine-tuned, gives the target speed-up for every token, batched or "
    "not, and better translations and summaries than dynamic skipping at the same price (numbers in figures only).",
    conditions=("Bloomz-7B and Llama on one A100", "fine-tuned for two epochs", "WMT22 and summaries"),
    method=Setting({"skip": f"unified:speedup={SPEEDUP}"}),
    baseline=Setting(),
    control=UNTRAINED if TRAINED else OTHERS,
    control_is="the same layers without the fine-tuning" if TRAINED else "as many layers, not spread: the first ones",
    line="evenly spread layers, fine-tuned: the speed-up asked for at better quality than dynamic skipping",
    promises=("answers", "cost", "time"),
    load=loads.lone(PROMPT, NEW),
    missing=("dynamic skipping at the same price",) + (() if TRAINED else ("the fine-tuning",)),
    counters=(
        Counter("(row, layer) pairs", "prompt rows x N + decoded rows x R",
                lambda case: case.work.row_layers,
                lambda case: loads.prompt_rows(case) * case.config.layers + (NEW - 1) * runs(case)),
        Counter("KV bytes held while decoding", "R / N of all rows",
                lambda case: case.method.steps[-2].kv,
                lambda case: (loads.prompt_rows(case) + NEW - 2) * case.row_bytes * runs(case) // case.config.layers),
    ),
    arithmetic=(KnobRatio("(row, layer) pairs of decoded tokens",
                    lambda case, run: run.work.row_layers - loads.prompt_rows(case) * case.config.layers),),
    quality=short_texts(),
    timings=(Timing("time per token at 512 tokens", 1.0, tokens=512),),
    note="Every layer of this pocket model does its part (docs/pocket.md): left out alone, layer 3 costs 0.04 nats of "
    "source and any other 0.14 to 1.6. Of the first edition every second layer did nothing and the others everything, "
    "and the same rule and recipe lost all replies that had to look back.",
)  # fmt: skip
