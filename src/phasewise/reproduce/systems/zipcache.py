"""ZipCache: rows that are looked at in four bits, the others in two."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import Tensor

from phasewise.kv.format import KEYS, VALUES, KVShape
from phasewise.methods.store._classed import Classed
from phasewise.methods.store.zipcache import SUMS, ZipCache, probed
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.shuffled import PermutedClasses
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
from phasewise.reproduce.workload import STRANGER
from phasewise.request.params import Params
from phasewise.request.request import Request

HIGH, LOW, GAP, UPPER, NEW = 4, 2, 100, 60, 40
METHOD = ZipCache(important=UPPER / GAP, gap=GAP)  # four bits and two
ON = Setting({"store": f"zipcache:high={HIGH},low={LOW},important={UPPER / GAP},gap={GAP}"})
BY_ROW = Classed(LOW, LOW, GAP, 0)
CLOSE, BETTER = 0.02, 0.1  # nats per token; share of the rows that matter, above chance


def taken(case: Case, seen: int, rows: int) -> int:
    """Bytes of `rows` rows in all layers, of which those are packed that are with `seen` of them there, and of the
    channels' scales where any are."""
    numbers = case.config.kv_heads * case.config.head_dim  # of one side of a row
    levels = UPPER * -(-numbers * HIGH // 8) + (GAP - UPPER) * -(-numbers * LOW // 8) + -(-GAP // 8)
    block = case.config.layers * (2 * levels + 2 * 4 * numbers + 4 * GAP)  # ends of keys by channel, of values by row
    scales = case.row_bytes // 2 if seen >= GAP else 0  # of the values' channels
    return seen // GAP * block + (rows - seen // GAP * GAP) * case.row_bytes + scales


def held(case: Case) -> int:
    """Before the last token."""
    rows = loads.prompt_rows(case) + NEW - 2
    return taken(case, rows, rows)


def read(case: Case) -> int:
    """Bytes that decoded tokens read: each reads the rows before it, and its own; the last of a block is asked what it
    reads."""
    prompt, total = loads.prompt_rows(case), 0
    for seen in range(prompt, prompt + NEW - 1):
        once = taken(case, seen, seen + 1)
        total += once * loads.halves_read() // 2 if (seen + 1) % GAP == 0 else once
    return total


@torch.inference_mode()
def marks(lab: Lab, share: float, length: int = 1024) -> list[Tensor]:
    """The saliency of each row of some code by a share of it as probes, layer by layer; 1 = by all rows."""
    with lab.engine(Setting({"store": f"zipcache:probes={share}"})) as engine:
        request = Request(lab.asked("pocket").code(length), Params(max_tokens=4, ignore_eos=True))
        engine.add(request)
        while request.prefilling:
            engine.step()
        sums = {layer: each[0].clone() for layer, each in request.state[SUMS].items()}
        engine.cancel(request)
    at = torch.tensor(probed(length, share, METHOD.seed))
    seeing = len(at) - torch.searchsorted(at, torch.arange(length))
    return [sums[layer] / seeing for layer in sorted(sums)]


def found(lab: Lab) -> AttemptOutcome:
    """The share of salient rows that a tenth of the rows finds as probes."""
    shares = []
    for few, every in zip(marks(lab, METHOD.probes), marks(lab, 1.0)):
        number = round(len(every) * UPPER / GAP)
        best = [set(each.topk(number).indices.tolist()) for each in (few, every)]
        shares.append(len(best[0] & best[1]) / number)
    share, chance = statistics.fmean(shares), UPPER / GAP
    return AttemptOutcome(share > chance + BETTER, f"{share:.1%} on average over layers, {min(shares):.1%} at least")


def separable(lab: Lab) -> AttemptOutcome:
    """Errors of values at two bits with channels at one scale, and as they are."""
    plain, one = (
        statistics.fmean(off(VALUES, layer[VALUES], BY_ROW, scaled) for layer in blocks.rows_of_a_prompt(lab))
        for scaled in (False, True)
    )
    return AttemptOutcome(one < 0.8 * plain, f"{one:.3f} of their norm with channels at one scale, {plain:.3f} without")


def channelwise(lab: Lab) -> AttemptOutcome:
    """Errors of keys at two bits rounded by channel, and by row with channels at one scale."""
    rows = blocks.rows_of_a_prompt(lab, model=STRANGER)
    mine, by_row = (
        statistics.fmean(off(KEYS, layer[KEYS], form) for layer in rows)
        for form in (replace(BY_ROW, by_channel=True), BY_ROW)
    )
    return AttemptOutcome(mine < 0.5 * by_row, f"{mine:.3f} of their norm by channel, {by_row:.3f} by row")


@torch.inference_mode()
def off(side: int, x: Tensor, form: Classed, scaled: bool = True) -> float:
    """The error of packed keys or values [H, n, D] as a share of their norm."""
    x = x[:, : x.shape[1] // GAP * GAP]
    settled = [plane[:, None] for plane in form.settle(side, x)]
    settled = settled if scaled else [torch.ones_like(plane) for plane in settled]
    planes = form.seal_ranked(side, x, torch.zeros(x.shape[1]), settled)
    back = form.open(side, [*planes, *settled], KVShape(x.shape[0], x.shape[2], x.dtype))
    return float((back - x).norm() / x.norm())


def finer(lab: Lab) -> AttemptOutcome:
    """Loss with four bits for all rows over that with rows as they are."""
    more = blocks.loss(lab, Setting({"store": "zipcache:low=4"})) - blocks.loss(lab, Setting())
    return AttemptOutcome(more <= CLOSE, f"{more:+.4f} nats per token")


ANY = Setting(objects={"store": PermutedClasses(METHOD)})
SYSTEM = System(
    title="ZipCache",
    paper=Paper("ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification",
                "2405.14256"),
    claim="four bits for 60 % of the rows and two for the others, by normalised attention of 10 % probe rows, compress "
    "KV 4.98 times and lose 0.38 points of accuracy.",
    conditions=("Mistral-7B, with 1,024 numbers in a row's keys", "GSM8k with chains of thought"),
    method=ON,
    baseline=Setting(),
    control=ANY,
    control_is="as many rows in either class, which ones shuffled",
    line="4 bits for rows that matter and 2 for others: 4.98 times smaller, 0.38 points lost",
    promises=("answers", "cost"),
    load=loads.lone(768, NEW),
    missing=("latency at 4,096 tokens and more",
             "4.98 times less: a value row's two ends weigh more where rows are as narrow as here, and a key channel's "
             "where as few as 100 rows share them"),
    counters=(
        Counter("KV bytes held before the last token",
                "packed rows: 0.6 x 4 + 0.4 x 2 bits a number and one for their class, 32 for a row of values, 64 for "
                "a channel of 100 rows of keys, 16 for a channel of values; others as they are",
                lambda case: case.method.steps[-2].kv, held),
        Counter("KV bytes read while decoding", "for every token, what its rows take at its position; without kernels "
                "the last of a block reads keys once more",
                lambda case: blocks.reads(case.method), read),
    ),
    arithmetic=(KnobRatio("KV bytes held before the last token", lambda case, run: run.steps[-2].kv),),
    quality=long_texts(always(ON), always(ANY)),
    attempts=(
        Attempt("mechanism", "rows that matter which a tenth of the rows finds", "over 10 points above chance (60 %)",
                found),
        Attempt("mechanism", "error of values at two bits", "less with channels at one scale, by a fifth", separable),
        Attempt("mechanism", f"error of {STRANGER}'s keys at two bits", "by channel at most half of that by row",
                channelwise, model=STRANGER),
        Attempt("answers", "loss of code in four bits", f"at most {CLOSE} nats more", finer, model="pocket"),
    ),
    timings=(Timing("time per token at 1,500 tokens, against rows as they are", tokens=1500, price=True),),
    note="A value row's two ends are shared by all numbers of its heads, so they weigh the more the fewer these are.",
)  # fmt: skip
