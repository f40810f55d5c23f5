"""InfLLM v2 of MiniCPM4: blocks chosen by the means of their keys, here without the training that makes it good."""

from __future__ import annotations

from phasewise.methods.attend.infllm import BlockMeans, InfLLM
from phasewise.reproduce import loads
from phasewise.reproduce.panel import long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.selected import RandomBlocks
from phasewise.reproduce.system import Case, Counter, KnobRatio, Paper, Setting, System, Timing

BLOCK, INIT, WINDOW, TOPK, LEAST, NEW = 16, 1, 32, 4, 256, 40
TEXT = 1024  # tokens that these numbers are for; of longer texts as large a share is read
METHOD, MEANS = InfLLM(BLOCK, INIT, WINDOW, TOPK, LEAST), BlockMeans(BLOCK)


def sized(tokens: int) -> tuple[int, int]:
    """Rows of the window and blocks that are chosen, of a text of so many tokens."""
    window = max(WINDOW, WINDOW * tokens // TEXT)
    rows = (INIT + TOPK) * BLOCK + WINDOW
    return window, (rows * tokens // TEXT - window) // BLOCK - INIT


def chosen(tokens: int) -> Setting:
    window, topk = sized(tokens)
    return Setting({"attend": f"infllm:block={BLOCK},init={INIT},window={window},topk={topk},dense_len={LEAST}"})


def drawn(tokens: int) -> Setting:
    window, topk = sized(tokens)
    return Setting(objects={"attend": RandomBlocks(BLOCK, INIT, window, topk, LEAST)})


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens but the first, which has the means of the prompt's last rows to make."""
    return sum(step.read for step in run.decoding[1:])


def closed(case: Case) -> int:
    """The rows of the blocks, the means of complete windows, and the keys of windows that have just become complete,
    twice: for the row that ends them, and to keep."""
    layers, prompt, stride = case.config.layers, loads.prompt_rows(case), MEANS.stride
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    total = 0
    for n in range(prompt + 2, prompt + NEW):  # rows that a token sees, itself included
        own = (n - 1) // BLOCK - METHOD.local + 1
        rows = (INIT + TOPK) * BLOCK + n - own * BLOCK
        before, kept = MEANS.windows(n - 1), MEANS.windows(n - 2)
        made = (before > kept) * (before + 1 - kept) * stride + (MEANS.windows(n) > before) * 2 * stride
        total += layers * key * (2 * rows + before + made)
    return total


SYSTEM = System(
    title="MiniCPM4, InfLLM v2",
    paper=Paper("MiniCPM4: Ultra-Efficient LLMs on End Devices", "2506.07900"),
    claim="a model that went on training with blocks chosen by mean keys answers nearly as well as dense (RULER at "
    "32K: 82.6 and 84.3) while it reads 6K of up to 128K tokens: attention is 3.1 to 7.4 times as fast.",
    conditions=("MiniCPM4-8B, 16 query heads per KV head, trained with it for 5B tokens", "A100 and RTX 4090",
                "128K tokens, prompts sparse as well"),
    method=chosen(TEXT),
    baseline=Setting(),
    control=drawn(TEXT),
    control_is="as many blocks, first and local ones among them, the others drawn at random per head and row",
    line="a model trained for chosen blocks: 6K of 128K tokens read, nearly dense answers, attention 3.1 "
    "to 7.4 times as fast",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("training that brings it nearer to dense: two short runs did not (docs/pocket.md)",
             "the speed of prompts"),
    counters=(
        Counter("KV bytes read while decoding",
                "rows of init + topk + local blocks, a mean per quarter of a block, keys of windows just complete",
                lambda case: read(case, case.method), closed),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", read),),
    quality=long_texts(chosen, drawn),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": chosen(8192)}),),
)  # fmt: skip
