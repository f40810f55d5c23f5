"""Quest: each query reads only the pages that promise the most."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.conversations import TOKENS, compared
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.selected import RandomPages
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Quality,
    Saving,
    Setting,
    System,
    Timing,
)

PAGE, BUDGET, DENSE, NEW = 16, 128, 2, 40
KNOBS = f"page={PAGE},budget={BUDGET},dense_layers={DENSE}"
TENTH = Setting({"attend": f"quest:page={PAGE},budget={TOKENS // 10},dense_layers={DENSE}"})
EVERYWHERE = Setting({"attend": f"quest:page={PAGE},budget={TOKENS // 10},dense_layers=0"})
EVICTED = Setting({"evict": "h2o:heavy=0.05,recent=0.05"})  # a tenth as well


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
    method=Setting({"attend": f"quest:{KNOBS}"}),
    baseline=Setting(),
    control=Setting(objects={"attend": RandomPages(PAGE, BUDGET, DENSE)}),
    control_is="as many pages, its own among them, the others drawn at random per head",
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes read while decoding",
                "rows of the budget + two bounds per page + keys of pages just complete",
                lambda case: read(case, case.method), closed),
    ),
    savings=(Saving("KV bytes read while decoding", read, "baseline", 1.5),),
    quality=Quality(("recall@1k", "passkey@1k"), allowed=0.1, examples=60),
    attempts=(
        Attempt("claim", f"second question about {TOKENS:,} tokens, a tenth of them read or kept, less H2O",
                "all of it above 0", later),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192),),
)  # fmt: skip
