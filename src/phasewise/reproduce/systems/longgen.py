"""LongGen: full attention in the middle third of the layers, sinks and a window in the others."""

from __future__ import annotations

from phasewise.methods.evict._windows import EVERY
from phasewise.methods.evict.longgen import LongGen
from phasewise.reproduce import loads
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

NEW = 40
METHOD = LongGen()
LONGER = 4  # times the tokens that are judged, and so the window: the clock does not care what was learned
DRAWN = Setting({"evict": "longgen:weights=random:0"})
TIMED = Setting({"evict": f"longgen:window={(METHOD.sinks + METHOD.window) * LONGER - METHOD.sinks},weights=random:0"})


def narrow(case: Case) -> int:
    """The number of layers that do not keep everything."""
    return len(METHOD.narrow(case.config))


def rows(case: Case, tokens: int) -> int:
    """Rows that all layers together hold of a text of so many tokens: all of them, or what the window left of them when
    EVERY rows had last gone out of it (of the prompt as soon as it was there), and all since."""
    size = METHOD.sinks + METHOD.window - 1  # what the next row sees beside itself
    first = max(loads.prompt_rows(case), size + EVERY)
    held = tokens if tokens < first else size + (tokens - first) % EVERY
    return (case.config.layers - narrow(case)) * tokens + narrow(case) * held


def last(run: PlayedRun) -> int:
    """KV bytes before the last token."""
    return run.steps[-2].kv


def each(case: Case) -> int:
    """Bytes of a row in one layer."""
    return case.row_bytes // case.config.layers


ON = Setting({"evict": "longgen"})
ANY = Setting({"evict": "longgen:weights=none"})
SYSTEM = System(
    title="LongGen",
    paper=Paper("A Little Goes a Long Way: Efficient Long Context Training and Inference with Partial Contexts",
                "2410.01485"),
    claim="full attention in a third of the layers suffices, in the middle, if the model goes on training with it: "
    "62% less KV, prompts 1.67 and tokens 1.41 times as fast at 128K, and long contexts answered as a dense model.",
    conditions=("Llama-2-7B and 70B, trained for 5B tokens from 4K to 128K", "windows or strided blocks elsewhere"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="the same mask without the training",
    line="full attention in a third of the layers: 62 % less KV, 1.41 times as fast, dense answers",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("strided blocks, trained", "the speed of training with the mask"),
    counters=(
        Counter("KV bytes held before the last token",
                "full layers x tokens + the others x (sinks + window - 1 + what waits to be dropped) rows",
                lambda case: last(case.method),
                lambda case: rows(case, loads.prompt_rows(case) + NEW - 2) * each(case)),
        Counter("KV bytes read while decoding", "what is held, and the row itself, over the decoded tokens",
                lambda case: sum(step.read for step in case.method.decoding),
                lambda case: sum(rows(case, loads.prompt_rows(case) + j) + case.config.layers
                                 for j in range(NEW - 1)) * each(case)),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: last(run)),),
    quality=long_texts(always(ON), always(ANY), stranger=False),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": TIMED}),
             Timing("seconds per prompt of 1,792 tokens (random weights)", 1.0, seconds=loads.per_token,
                    load=loads.lone(1792, 1), settings={"method": DRAWN})),
    note="The window is 252 rows of the pocket model's 2,048, and three layers of eight are full: a third, rounded. "
    "Full layers at the ends or nowhere, trained as long, find a quarter of the words or fewer (docs/pocket.md).",
)  # fmt: skip
