"""SkipDecode: later tokens of an answer run fewer layers, in nested sets."""

from __future__ import annotations

from phasewise.methods.skip.skip_decode import SkipDecode
from phasewise.reproduce import loads
from phasewise.reproduce.panel import short_texts
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

PROMPT, NEW = 256, 48
KNOBS = SkipDecode(tokens=NEW)


def depths(case: Case) -> int:
    """Layers that all decoded rows run together; the last token is never run."""
    return sum(KNOBS.depth(case.config.layers, token) for token in range(NEW - 1))


def decoded(case: Case, row_layers: int) -> int:
    return row_layers - loads.prompt_rows(case) * case.config.layers


SYSTEM = System(
    title="SkipDecode",
    paper=Paper(
        "SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference", "2307.02628"
    ),
    claim="fewer layers for every later token, the lower middle ones passed by, give 2 to 5 times the speed with "
    "negligible regression, in batches and without recomputing KV.",
    conditions=("OPT-1.3B and 6.7B, fine-tuned per task", "E2E, Reddit-TLDR and CNN-DM"),
    method=Setting({"skip": f"skip_decode:tokens={NEW}"}),
    baseline=Setting(),
    control=Setting({"skip": f"unified:speedup={2 / (KNOBS.first + KNOBS.last):.4f},weights=none"}),
    control_is="the same mean depth, as evenly spread layers for every token (Unified Layer Skipping, untuned)",
    line="fewer layers for later tokens: 2 to 5 times as fast with negligible regression",
    promises=("answers", "cost", "time"),
    load=loads.lone(PROMPT, NEW),
    missing=("fine-tuning per task", "speed-ups of 2 and more: half of the depth is the least that is tried here"),
    counters=(
        Counter("(row, layer) pairs", "prompt rows x N + the sum of the depths of decoded rows",
                lambda case: case.work.row_layers,
                lambda case: loads.prompt_rows(case) * case.config.layers + depths(case)),
        Counter("rows recomputed", "none: sets of layers are nested", lambda case: case.work.recomputed,
                lambda case: 0),
    ),
    arithmetic=(KnobRatio("(row, layer) pairs of decoded tokens",
                          lambda case, run: decoded(case, run.work.row_layers)),),
    quality=short_texts(),
    timings=(Timing("time per token at 512 tokens", 1.0, tokens=512),),
)  # fmt: skip
