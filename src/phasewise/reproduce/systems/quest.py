"""Quest: each query reads only the pages that promise the most."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.conversations import TOKENS, compared
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.selected import RandomPages
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Paper,
    Setting,
    System,
    Timing,
)

PAGE, BUDGET, DENSE, NEW = 16, 128, 2, 40
SHARE = 8  # a part of so many of a text's rows is read, whatever is judged or timed
TENTH = Setting({"attend": f"quest:page={PAGE},budget={TOKENS // 10},dense_layers={DENSE}"})
EVERYWHERE = Setting({"attend": f"quest:page={PAGE},budget={TOKENS // 10},dense_layers=0"})
EVICTED = Setting({"evict": "h2o:heavy=0.05,recent=0.05"})  # a tenth as well


def chosen(tokens: int) -> Setting:
    return Setting({"attend": f"quest:page={PAGE},budget={tokens // SHARE},dense_layers={DENSE}"})


def drawn(tokens: int) -> Setting:
    return Setting(objects={"attend": RandomPages(PAGE, tokens // SHARE, DENSE)})


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of the decoded tokens."""
    return sum(step.read for step in run.decoding)


def closed(case: Case) -> int:
    """Rows within the budget, two bounds per page, and every key once more when its page is complete."""
    layers, prompt = case.config.layers, loads.prompt_rows(case)
    key = case.row_bytes // layers // 2  # bytes of a row's keys in a layer
    total = sealed = 0
    for n in range(prompt + 1, prompt + NEW):  # rows that a token sees, itself included
        pages, own = (n - 1) // PAGE, (n - 1) % PAGE + 1
        rows = (BUDGET - own) // PAGE * PAGE + own
        fresh = n - 1 - sealed * PAGE if pages > sealed else 0
        total += DENSE * n * 2 * key + (layers - DENSE) * (rows * 2 + pages * 2 + fresh) * key
        sealed = pages
    return total


def later(lab: Lab) -> AttemptOutcome:
    """Second questions about a text: rows that the first one did not need are there, where H2O has given them up."""
    return compared(lab, TENTH, {"H2O": EVICTED}, {"dense": Setting(), "in all layers": EVERYWHERE})


SYSTEM = System(
    title="Quest",
    paper=Paper("Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", "2406.10774"),
    claim="page bounds find the rows that a query needs: pass keys in 10K tokens are found in 99 % of the cases with "
    "64 to 256 rows where evicting methods find 8 % at most; attention is up to 7.03 times, decoding 2.23 times as "
    "fast.",
    conditions=("LongChat-7B and Yarn-Llama-2-7B", "contexts of 10K to 100K tokens", "RTX 4090 and A100"),
    method=chosen(SHARE * BUDGET),
    baseline=Setting(),
    control=drawn(SHARE * BUDGET),
    control_is="as many pages, its own among them, the others drawn at random per head",
    line="pages by bounds: 64 to 256 rows of 10K find pass keys as all do, 2.23 times as fast",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes read while decoding",
                "rows of the budget + two bounds per page + keys of pages just complete",
                lambda case: read(case, case.method), closed),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", read),),
    quality=long_texts(chosen, drawn),
    attempts=(
        Attempt("answers", f"second question about {TOKENS:,} tokens, a tenth of them read or kept, less H2O",
                "all of it above 0", later, model="pocket"),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": chosen(8192)}),),
)  # fmt: skip
