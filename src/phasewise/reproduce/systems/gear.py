"""GEAR: few bits, a thin product for what they miss, and outliers apart."""

from __future__ import annotations

import statistics

from phasewise.kv.format import BlockCut
from phasewise.methods.store._approximated import Approximated
from phasewise.methods.store._grouped import Grouped
from phasewise.reproduce import batches, loads
from phasewise.reproduce.controls import Elsewhere
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
from phasewise.reproduce.systems import _blocks as blocks

BITS, GROUP, BLOCK, RANK, SPARSE, NEW = 2, 64, 64, 4, 0.02, 40
CUTS = BlockCut(BLOCK), BlockCut(BLOCK)
CLOSE = 0.02  # nats per token
LARGER = 1.5  # times as many requests in the same bytes
ON = Setting({"store": f"gear:bits={BITS},group={GROUP},block={BLOCK},rank={RANK},sparse={SPARSE}"})


def format(rank: int = RANK, sparse: float = SPARSE) -> Approximated:
    return Approximated(BITS, GROUP, CUTS, rank=rank, sparse=sparse)


def bits(case: Case) -> tuple[float, float]:
    """Per number of keys and of values: levels, their ends, the product, outliers and their places."""
    dim = case.config.head_dim
    product = 16 * RANK * (BLOCK + dim) / (BLOCK * dim)
    lines = (BLOCK, dim)  # numbers of a channel, of a token
    keys, values = (
        BITS + 32 / min(GROUP, along) + product + 32 * 2 * format().outliers(along) / along for along in lines
    )
    return keys, values


def order(lab: Lab) -> AttemptOutcome:
    """Each part brings the rows of a prompt nearer to what they were."""
    rows = blocks.rows_of_a_prompt(lab)
    formats = (Grouped(BITS, GROUP, CUTS), format(sparse=0), format())
    off = [statistics.fmean(blocks.errors(rows, each)) for each in formats]
    said = ", ".join(f"{share:.3f}" for share in off)
    return AttemptOutcome(
        off[0] > off[1] > off[2], f"{said} of their norm: bits alone, with the product, with outliers apart"
    )


def finer(lab: Lab) -> AttemptOutcome:
    """Loss with four bits over that with rows as they are."""
    four = Setting({"store": f"gear:bits=4,group={GROUP},block={BLOCK},rank={RANK},sparse={SPARSE}"})
    more = blocks.loss(lab, four) - blocks.loss(lab, Setting())
    return AttemptOutcome(more <= CLOSE, f"{more:+.4f} nats per token")


ANY = Setting(objects={"store": Elsewhere(BITS, GROUP, BLOCK, RANK, SPARSE)})
SYSTEM = System(
    title="GEAR",
    paper=Paper("GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM",
                "2403.05527"),
    claim="a product of rank 4 for what few bits miss, and 2 % outliers apart, make 4 bits nearly lossless: up to 2.38 "
    "times the throughput and 2.29 times less peak memory.",
    conditions=("Llama-2 and Llama-3, Mistral-7B", "GSM8k, AQuA and BigBench with chains of thought",
                "one product for all of a prompt"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many bytes, but every head has the product of another head",
    line="few bits, a thin product and outliers: nearly lossless, 2.29 times less memory, 2.38 times the throughput",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes held before the last token",
                "levels, their ends, products, outliers and places of sealed blocks; the others as they are",
                lambda case: case.method.steps[-2].kv, lambda case: blocks.held(case, CUTS, bits(case), NEW)),
        Counter("KV bytes read while decoding", "for every token, what its rows take at its position",
                lambda case: blocks.reads(case.method), lambda case: blocks.read(case, CUTS, bits(case), NEW)),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY)),
    attempts=(
        Attempt("mechanism", "error of rows, part by part", "less with every part", order),
        Attempt("answers", "loss of code in four bits", f"at most {CLOSE} nats more", finer, model="pocket"),
        *batches.attempts(ON, LARGER),
    ),
    timings=(Timing("time per token at 1,500 tokens, against rows as they are", tokens=1500, price=True),),
    note="In bfloat16 kernels multiply packed levels, thin matrices and outliers as they lie; where there are none, "
    "blocks are opened before they are read. Time per token is a price here; docs/results/savers.md has longer "
    "contexts.",
)  # fmt: skip
