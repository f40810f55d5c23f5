"""LazyLLM: tokens that the last one does not look at leave a prompt's layers, and come back when they are needed."""

from __future__ import annotations

from phasewise.bench.stats import shares
from phasewise.methods.skip.lazyllm import LazyLLM, going
from phasewise.reproduce import loads
from phasewise.reproduce.answers import right
from phasewise.reproduce.controls import RandomNeeds
from phasewise.reproduce.conversations import seconds
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
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

METHOD = LazyLLM(keep=0.1, start=0.125)
KNOBS = f"lazyllm:keep={METHOD.keep},start={METHOD.start}"
ON, STATIC = Setting({"skip": KNOBS}), Setting({"skip": f"{KNOBS},revive=false"})
NEW = 32
LADDER = (METHOD, LazyLLM(), LazyLLM(keep=0.3, start=0.5, stages=1), LazyLLM(keep=0.5, start=0.5, stages=1))


def pairs(method: LazyLLM, rows: int, layers: int) -> int:
    """(row, layer) pairs of a prompt of so many rows."""
    falls, here, total = method.shares(layers), rows, 0
    for layer in range(layers):
        total += here
        here = going(falls[layer], rows) if layer in falls else here
    return total


def first(case: Case) -> int:
    return pairs(METHOD, loads.prompt_rows(case), case.config.layers)


def over_pairs(lab: Lab) -> AttemptOutcome:
    """Recall at several settings, by the share of a prompt's (row, layer) pairs that they run."""
    n, layers = lab.scale.examples or (6 if lab.scale.quick else 40), lab.model("pocket").config.layers
    said = list[str]()
    found = list[float]()
    for each in LADDER:
        setting = Setting({"skip": f"lazyllm:keep={each.keep},start={each.start},stages={each.stages}"})
        found.append(sum(right(lab, setting, "recall@1k", n)) / n)
        said.append(f"{found[-1]:.0%} with {pairs(each, 1000, layers) / 1000 / layers:.0%}")
    return AttemptOutcome(found[-1] >= found[0], f"{', '.join(said)}, of {n}")


def with_and_without(lab: Lab) -> AttemptOutcome:
    """Second questions with revival, less without it."""
    n = lab.scale.examples or (6 if lab.scale.quick else 60)
    found = {name: seconds(lab, each, n) for name, each in (("dense", Setting()), ("with", ON), ("without", STATIC))}
    lead = shares(found["with"], found["without"])
    words = ", ".join(f"{name} {sum(grades) / n:.0%}" for name, grades in found.items())
    return AttemptOutcome(lead.low > 0, f"{lead.text(True)} ({words}, of {n})")


ANY = Setting(objects={"skip": RandomNeeds(METHOD)})
SYSTEM = System(
    title="LazyLLM",
    paper=Paper("LazyLLM: Dynamic Token Pruning for Efficient Long Context LLM Inference", "2407.14057"),
    claim="tokens that the last one does not attend to leave the layers of a prompt and are computed later if they are "
    "needed after all: 2.34 times faster to the first token of multi-document questions with Llama 2 7B, at the same "
    "accuracy.",
    conditions=("Llama 2 7B and XGen 7B on LongBench, prompts of some thousand tokens", "A100",
                "layers and rates that the paper does not print"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many tokens go on after the same layers, and as many are needed later, but any",
    line="prompt tokens that nobody needs leave: 2.34 times sooner to the first token, the same accuracy",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, 1),
    missing=("models of 32 layers, which have more of them to leave out",),
    counters=(
        Counter("(row, layer) pairs at the first token", "sum over the layers of the rows that get there",
                lambda case: case.work.row_layers, first),
        Counter("(row, layer) pairs with all tokens", "at most (prompt + tokens - 1) x layers",
                lambda case: case.work.row_layers,
                lambda case: (loads.prompt_rows(case) + NEW - 1) * case.config.layers, bound="at most",
                load=loads.lone(768, NEW)),
        Counter("KV bytes written", "those of a row at a layer for every pair, each once",
                lambda case: case.work.kv_bytes_written,
                lambda case: case.work.row_layers * case.row_bytes // case.config.layers, load=loads.lone(768, NEW)),
    ),
    arithmetic=(
        KnobRatio("(row, layer) pairs at the first token", lambda case, run: run.work.row_layers),
    ),
    quality=long_texts(always(ON), always(ANY)),
    attempts=(
        Attempt("control", "second question about the same 1,000 tokens, with revival less without it",
                "all of it above 0", with_and_without, "answers", "pocket"),
        Attempt("mechanism", "recall@1k over the share of the prompt's pairs that run",
                "no worse with the most than with the least", over_pairs),
    ),
    timings=(Timing("time to the first token of 1,900 tokens", 1.0, lambda run: run.requests[0].trace.ttft or 0.0,
                    load=loads.lone(1900, 2)),),
    note="The control runs as many pairs of a prompt; how many come back later depends on whom the tokens need.",
)  # fmt: skip
