"""InstInfer: attention where the KV lies, by SparF; the drive is modelled, so its speed is nobody's to measure here."""

from __future__ import annotations

from phasewise.methods.attend.instinfer import InstInfer
from phasewise.reproduce import loads
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.selected import RandomKept
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing
from phasewise.step.plan import share

R, SHARE, GROUP, NEW = 8, 0.125, 16, 40
KNOBS = f"r={R}.0,k={SHARE}"


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def closed(case: Case, group: int) -> int:
    """r lines of every row before, k rows with `group` - 1 others each, the sum of the values, and each row once more
    when it enters the index."""
    layers, prompt, config = case.config.layers, loads.prompt_rows(case), case.config
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    total = indexed = 0
    for n in range(prompt + 1, prompt + NEW):  # rows that a token sees, itself included
        rows = min(n, share(SHARE, n) * group)
        each = rows * 2 * key + (n - 1) * key * R // config.head_dim + config.kv_heads * config.head_dim * 4
        total += layers * (each + (n - 1 - indexed) * 2 * key)
        indexed = n - 1
    return total


def link(case: Case) -> int:
    """A query, a key and a value down, an output up, for every decoded token and layer."""
    config, width = case.config, case.row_bytes // case.config.layers // 2 // case.config.kv_heads
    return (NEW - 1) * config.layers * (2 * config.heads + 2 * config.kv_heads) * width


ON = Setting({"attend": f"instinfer:{KNOBS}"})
ANY = Setting(objects={"attend": RandomKept(InstInfer(float(R), SHARE, GROUP))})
SYSTEM = System(
    title="InstInfer",
    paper=Paper("InstInfer: In-Storage Attention Offloading for Cost-Effective Long-Context LLM Inference",
                "2409.04992"),
    claim="attention computed in the drive that holds the KV, over an eighth of the rows and channels: the link "
    "carries 4 vectors per layer and token instead of all keys and values; up to 11.1 times FlexGen's throughput.",
    conditions=("OPT-13B, 1 to 20 drives that compute, one A6000", "offline, batches of 64",
                "rows are fetched in groups of 16"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows, its own among them, the others drawn at random per head, and the mean of all values for "
    "what these are not thought to weigh",
    line="attention in the drive over an eighth of rows and channels: 11.1 times FlexGen's throughput",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("drives, and so the throughput", "several drives", "the dense mode in the drive"),
    counters=(
        Counter("KV bytes read while decoding, rows fetched one by one",
                "r lines of every row before + k rows + the sum of the values + each row once for the index",
                lambda case: read(case, case.method), lambda case: closed(case, 1),
                load=loads.lone(768, NEW), who=Setting({"attend": f"instinfer:{KNOBS},group=1"})),
        Counter("KV bytes read while decoding, rows fetched in groups of 16", "as if every row brought 15 others",
                lambda case: read(case, case.method), lambda case: closed(case, GROUP), bound="at most"),
        Counter("bytes that would cross the link", "(2 query heads + 2 KV heads) x D per layer and token",
                lambda case: case.work.link_bytes, link),
    ),
    arithmetic=(
        KnobRatio("bytes over the link, against KV that is fetched", lambda case, run: run.work.link_bytes or
               read(case, run)),
    ),
    quality=long_texts(always(ON), always(ANY)),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights), no drive between", 1.0,
                    model="random-dense", tokens=8192),),
)  # fmt: skip
