"""MoBA: each query reads the blocks whose mean key it meets best."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.panel import long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.selected import RandomPages
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

BLOCK, BLOCKS, NEW = 16, 8, 40
TEXT = 1024  # tokens of which so many blocks are read; of longer texts as large a share


def chosen(tokens: int) -> Setting:
    return Setting({"attend": f"moba:block={BLOCK},blocks={BLOCKS * tokens // TEXT}"})


def bounded(tokens: int) -> Setting:
    budget = BLOCK * BLOCKS * tokens // TEXT
    return Setting({"attend": f"quest:page={BLOCK},budget={budget},dense_layers=0"})


def drawn(tokens: int) -> Setting:
    return Setting(objects={"attend": RandomPages(BLOCK, BLOCK * BLOCKS * tokens // TEXT, 0)})


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def closed(case: Case) -> int:
    """Rows of the blocks, a mean per complete block, and every key once more when its block is complete."""
    layers, prompt = case.config.layers, loads.prompt_rows(case)
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    total = known = 0
    for n in range(prompt + 1, prompt + NEW):  # rows that a token sees, itself included
        complete, own = (n - 1) // BLOCK, (n - 1) % BLOCK + 1
        fresh = n - 1 - known * BLOCK if complete > known else 0
        total += layers * (((BLOCKS - 1) * BLOCK + own) * 2 + complete + fresh) * key
        known = complete
    return total


SYSTEM = System(
    title="MoBA",
    paper=Paper("MoBA: Mixture of Block Attention for Long-Context LLMs", "2502.13189"),
    claim="a gate without weights, the product of a query and a block's mean key, finds the blocks that matter: "
    "models trained with it answer as well as dense ones, with prompts up to 16 times as fast at 10M tokens.",
    conditions=("Llama-3.1-8B, continued to 1M tokens with sparse prompts", "blocks of 512 to 4,096 tokens"),
    method=chosen(TEXT),
    baseline=Setting(),
    control=drawn(TEXT),
    control_is="as many blocks of the same size, a row's own among them, the others drawn at random per head",
    line="blocks by mean keys: a trained model answers as a dense one, prompts up to 16 times as fast",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("training with sparse attention", "sparse prompts"),
    counters=(
        Counter("KV bytes read while decoding", "rows of the blocks + a mean per block + keys of blocks just complete",
                lambda case: read(case, case.method), closed),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", read),),
    quality=long_texts(chosen, drawn, beside={"Quest": bounded}),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": chosen(8192)}),),
)  # fmt: skip
