"""PowerAttention: a local window, and blocks at distances of powers of two."""

from __future__ import annotations

import torch
from torch import Tensor

from phasewise.bench.stats import means
from phasewise.methods.attend.power import Power
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Paper,
    Quality,
    Setting,
    System,
    Timing,
)
from phasewise.step.plan import Window

NEW = 40
METHOD = Power()
ON, BARE = Setting({"attend": "power"}), Setting({"attend": "power:weights=none"})
LONG = Quality(("code",), allowed=0.0, examples=48, window=2000, given=1872)
WINDOW = Setting({"attend": "power:far=none,window=8"})  # as many blocks as the mask has at the end of a context
DRAWN = Setting({"attend": "power:weights=random:0"})  # for the clock, which does not care what was learned


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def rows(at: int) -> int:
    """Rows that the row at this position sees, itself included, block by block."""
    own = at // METHOD.block
    near = [own - b < METHOD.window or b < METHOD.sinks or (own - b).bit_count() == 1 for b in range(own)]
    return sum(near) * METHOD.block + at % METHOD.block + 1


def closed(case: Case) -> int:
    prompt = loads.prompt_rows(case)
    return sum(rows(prompt + j) for j in range(NEW - 1)) * case.row_bytes


def depth(mask: Tensor) -> int:
    """Layers after which the last of these blocks has heard of all before it, by brute force."""
    heard, layers = torch.eye(len(mask))[-1:], 0
    while not bool(heard.all()):
        heard, layers = (heard @ mask > 0).float(), layers + 1
    return layers


def hears(lab: Lab) -> AttemptOutcome:
    """Checks that a row hears of all blocks of the context in fewer layers than with a window of as many blocks."""
    blocks = torch.arange(lab.model("pocket").config.max_positions // METHOD.block)
    own = Power(1, METHOD.window, METHOD.sinks).seen(blocks[:, None], blocks[None]).tril().float()
    degree = int(own.sum(1).max())
    window = Window(0, degree).seen(blocks[:, None], blocks[None]).tril().float()
    ours, theirs = depth(own), depth(window)
    return AttemptOutcome(ours < theirs, f"{ours}, with a window of as many blocks ({degree}) {theirs}")


def trained(lab: Lab) -> AttemptOutcome:
    """The gain of training where the mask leaves most of the text out: at the end of a whole context."""
    n = 2 if lab.scale.quick else lab.scale.examples or LONG.examples
    gain = means(*(losses(lab, each, LONG, n) for each in (ON, BARE)))
    return AttemptOutcome(gain.low > 0, f"log-likelihood {gain.text(False)}")


SYSTEM = System(
    title="PowerAttention",
    paper=Paper("PowerAttention: Exponentially Scaling of Receptive Fields for Effective Sparse Attention",
                "2503.03588"),
    claim="a static mask of O(log n) blocks per row reaches 2^d blocks in d layers: a model trained with it is 5 to "
    "40% better on long tasks than with other static masks, and 3.0 times as fast as with full attention at 128K.",
    conditions=("Qwen2-7B, fine-tuned with the mask", "passkeys and RULER, up to 128K"),
    method=ON,
    baseline=Setting(),
    control=BARE,
    control_is="the same mask without the training",
    line="a static mask of O(log n) blocks: better than other masks, 3.0 times as fast at 128K",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes read while decoding",
                "rows of the first, the last and the power-of-two blocks before each token's, in every layer",
                lambda case: read(case, case.method), closed),
        Counter("KV bytes held before the last token", "all rows",
                lambda case: case.method.steps[-2].kv,
                lambda case: (loads.prompt_rows(case) + NEW - 2) * case.row_bytes),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", read),),
    quality=long_texts(always(ON), always(BARE), rivals={"a window, trained as long": always(WINDOW)}, stranger=False),
    attempts=(
        Attempt("control", f"likelihood of code after {LONG.given:,} tokens of it, less that without the training",
                "all of it above 0", trained, "answers", "pocket"),
        Attempt("mechanism", "layers in which the last row of a context hears of all its blocks", "fewer", hears),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": DRAWN}),
             Timing("seconds per prompt of 8,192 tokens (the same)", 1.0, seconds=loads.per_token,
                    load=loads.lone(8192, 1), model="random-dense", settings={"method": DRAWN})),
    note="Blocks are 32 rows here, for a context of 2,048. Steps with low-rank weights go operator by operator, which "
    "the clock shows.",
)  # fmt: skip
