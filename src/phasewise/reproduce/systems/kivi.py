"""KIVI: keys by channel and values by token, in two bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from phasewise.kv.format import BlockCut, RowFormat
from phasewise.methods.store._grouped import Grouped
from phasewise.reproduce import batches, loads
from phasewise.reproduce.controls import Control, Swapped
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Counter,
    KnobRatio,
    Paper,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.systems import _blocks as blocks
from phasewise.reproduce.workload import STRANGER
from phasewise.verbs.store import Storing
from phasewise.verbs.traits import Traits

BITS, GROUP, RESIDUAL, NEW = 2, 32, 128, 40
CUTS = BlockCut(RESIDUAL), BlockCut(1, RESIDUAL)
WORSE, CLOSE = 2.0, 0.02  # times, and nats per token
LARGER = 1.5  # times as many requests in the same bytes
ALIKE, STRETCHES = 0.99, 16  # of greedy choices in eight bits, at so many places of code
EACH = (BITS + 32 / GROUP,) * 2
ON = Setting({"store": f"kivi:bits={BITS},group={GROUP},residual={RESIDUAL}"})
TURNED = Setting(objects={"store": Swapped(BITS, GROUP, RESIDUAL)})


@dataclass(frozen=True)
class InBits(Control, Storing):
    """store: KIVI in any number of bits up to 8."""

    bits: int
    traits: ClassVar[Traits] = Traits("store", packs_blocks=True)

    def format(self) -> RowFormat:
        return Grouped(self.bits, GROUP, CUTS)


def axes(lab: Lab, model: str = "pocket") -> AttemptOutcome:
    """The same rows with the axes as they are, and swapped."""
    rows = blocks.rows_of_a_prompt(lab, model=model)
    keys, _ = blocks.errors(rows, Grouped(BITS, GROUP, CUTS))
    swapped, _ = blocks.errors(rows, Grouped(BITS, GROUP, CUTS[::-1], (False, True)))
    return AttemptOutcome(swapped > WORSE * keys, f"{swapped:.3f} of their norm by token, {keys:.3f} by channel")


def finer(lab: Lab) -> AttemptOutcome:
    """Loss with four bits over that with rows as they are."""
    four = Setting({"store": f"kivi:bits=4,group={GROUP},residual={RESIDUAL}"})
    more = blocks.loss(lab, four) - blocks.loss(lab, Setting())
    return AttemptOutcome(more <= CLOSE, f"{more:+.4f} nats per token")


def choices(lab: Lab, bits: int = 8) -> AttemptOutcome:
    """Greedy choices that are those of rows as they are, in as many bits as leave hardly any rounding."""
    share = blocks.alike(lab, Setting(objects={"store": InBits(bits)}), STRETCHES)
    return AttemptOutcome(share > ALIKE, f"{share:.2%}")


SYSTEM = System(
    title="KIVI",
    paper=Paper("KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "2402.02750"),
    claim="two bits a number, keys by channel and values by token, keep answers nearly as they were: 2.6 times less "
    "peak memory, weights included, batches up to 4 times as large and 2.35 to 3.47 times the throughput.",
    conditions=("Llama, Falcon and Mistral of 7B and 13B", "CoQA, TruthfulQA, GSM8K, LongBench",
                "one A100, and a kernel that multiplies packed numbers"),
    method=ON,
    baseline=Setting(),
    control=TURNED,
    control_is="as many bits with the axes swapped: keys by token, values by channel",
    line="two bits, keys by channel: nearly the same answers, 2.6 times less memory, 2.35 to 3.47 times the throughput",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    counters=(
        Counter("KV bytes held before the last token",
                "bits + 32 / group bits of sealed numbers, keys but L mod R, values but R; the others as they are",
                lambda case: case.method.steps[-2].kv, lambda case: blocks.held(case, CUTS, EACH, NEW)),
        Counter("KV bytes read while decoding", "for every token, what its rows take at its position",
                lambda case: blocks.reads(case.method), lambda case: blocks.read(case, CUTS, EACH, NEW)),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(TURNED)),
    attempts=(
        Attempt("control", "error of keys with the axes swapped", f"over {WORSE} times that by channel", axes,
                "mechanism"),
        Attempt("control", f"error of keys with the axes swapped, {STRANGER}", f"over {WORSE} times that by channel",
                partial(axes, model=STRANGER), "mechanism", STRANGER),
        Attempt("answers", "loss of code in four bits", f"at most {CLOSE} nats more", finer, model="pocket"),
        Attempt("mechanism", "greedy choices in eight bits that are those of rows as they are", f"over {ALIKE:.0%}",
                choices),
        *batches.attempts(ON, LARGER),
    ),
    timings=(Timing("time per token at 1,500 tokens, against rows as they are", tokens=1500, price=True),),
    note="In bfloat16 kernels multiply packed numbers as they lie; where there are none, blocks are opened before they "
    "are read. Time per token is a price here; what it is worth on longer contexts is in docs/results/savers.md.",
)  # fmt: skip
