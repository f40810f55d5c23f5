"""CacheGen: prompts' KV on its way between engines, coded to its entropy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from phasewise.bench.stats import means
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.kv.wire import Dump, RowsOrigin
from phasewise.methods.store._cachegen.rounding import LEVELS, Rounded, compress
from phasewise.options import parse
from phasewise.reproduce import loads, stored
from phasewise.reproduce.controls import Coarse
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import always, long_texts
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Paper,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.systems import _blocks as blocks
from phasewise.request.params import Params
from phasewise.request.request import Request

APART, LEVEL = {"place": "disaggregated"}, 2
CLOSE, STRETCHES = 0.005, 16  # nats per token, and places of code
ROUNDING = 2.0**-8  # of a number, where it is kept in bfloat16


def scales(case: Case) -> int:
    """Bytes of a row's scales: bfloat16, one per layer and head, for keys and for values."""
    return 2 * 2 * case.config.layers * case.config.kv_heads


def sent(lab: Lab) -> Iterator[tuple[Dump, Dump, int]]:
    """The KV of some prompts as it was, as it arrives, and the bytes between."""
    methods = parse({"store": f"cachegen:level={LEVEL}"})
    builder = Builder(lab.model("pocket"), methods, Limits(prefix_cache=False), load=lab.model)
    for entry in loads.answering("recall@1k", n=8)(lab.asked("pocket")):
        engine, request = builder.engine(("prefill",), 1.0), Request(entry.prompt, Params(max_tokens=2))
        engine.add(request)
        while request not in engine.departed:
            engine.step()
        assert request.kv is not None and request.kv.wire is not None
        rows = request.kv.dump()
        encoded = request.kv.wire.encode(rows, RowsOrigin())
        yield rows, request.kv.wire.decode(encoded.content), sum(chunk.nbytes for chunk in encoded.content["chunks"])
        engine.depart(request)


def planes(dump: Dump) -> list[Tensor]:
    """Keys and values, layer by layer, a row per token: float32 [R, heads * D]."""
    return [plane.transpose(0, 1).flatten(1).float() for piece in dump for plane in piece["planes"]]


def steps(at: int, count: int) -> int:
    """On either side of zero, of the plane `at` of `count`."""
    return LEVELS[LEVEL - 1].steps(at // 2, count // 2)[at % 2]


@torch.inference_mode()
def off(lab: Lab) -> AttemptOutcome:
    """The error of numbers that arrive, in half steps of their row."""
    worst = 0.0
    for before, after, _ in sent(lab):
        rows = planes(before)
        for at, (x, y) in enumerate(zip(rows, planes(after), strict=True)):
            half = x.abs().amax(-1, keepdim=True) / (2 * steps(at, len(rows)))
            kept = ROUNDING * (x.abs().amax(-1, keepdim=True) + half)
            worst = max(worst, float((((x - y).abs() - kept) / half).max()))
    return AttemptOutcome(0 < worst <= 1, f"{worst:.3f} half steps")


@torch.inference_mode()
def coded(lab: Lab) -> AttemptOutcome:
    """Bytes against the entropy of the symbols per layer and channel, and as one histogram for all."""
    n_bytes = numbers = rows = 0
    apart, together = 0.0, np.zeros(256)
    for before, _, taken in sent(lab):
        every = planes(before)
        for at, x in enumerate(every):
            form: Rounded = compress(x, steps(at, len(every)), 1)[0]
            channels = [np.bincount(column, minlength=256) for column in form.symbols.T.numpy()]
            apart += sum(map(bits, channels)) / 8
            together += sum(channels)
        rows += 2 * sum(x.shape[0] for x in every)  # bytes of scales
        numbers, n_bytes = numbers + sum(x.numel() for x in every), n_bytes + taken
    low, high = (8 * (size + rows) / numbers for size in (apart, bits(together) / 8))
    mine = 8 * n_bytes / numbers
    return AttemptOutcome(low <= mine < high, f"{mine:.3f} bits, between {low:.3f} and {high:.3f}")


def bits(counts: np.ndarray) -> float:
    """An ideal code of symbols that come so often."""
    there = counts[counts > 0]
    return float(-(there * np.log2(there / there.sum())).sum())


def ladder(lab: Lab) -> AttemptOutcome:
    """Code behind prompts that came at each level, against prompts that came as they are.

    A token's loss may fall as well as rise, so it is the mean of how far tokens' losses go that tells levels apart;
    their own mean must not fall by more than chance.
    """
    levels = range(len(LEVELS) + 1)
    sent = [Setting({**APART, "store": f"cachegen:level={level}"}) for level in levels]
    plain, *found = (blocks.nats(lab, each, STRETCHES) for each in sent)
    off = [0.0, *(statistics.fmean(abs(x - y) for x, y in zip(each, plain)) for each in found)]
    more = [statistics.fmean(each) - statistics.fmean(plain) for each in found]
    further = all(fine < coarse for fine, coarse in pairwise(off))
    falls = any(means(coarse, fine).high < 0 for fine, coarse in pairwise([plain, *found]))
    said = ", ".join(f"{far:.4f} (mean {loss:+.4f})" for far, loss in zip(off[1:], more))
    return AttemptOutcome(further and not falls and abs(more[0]) <= CLOSE, said)


SLOW, FAST = 2e6, 2e8  # bytes a second, simulated: a link of 16 Mbit/s, a disk of 200 MB/s
SOONER, PATIENCE = 3.2, 0.5  # of the claim; seconds that level=auto is given


def loading(lab: Lab, bandwidth: float) -> dict[str, tuple[float, int]]:
    """Seconds to the first token of a stored context of 1,024 tokens, and bytes read, by the form it is stored in."""
    coded = f"weights={stored.profiled(lab, 'pocket')}"
    stores = {"raw": "slab", "8 bits": "int8"}
    stores |= {f"level {level}": f"cachegen:level={level},{coded}" for level in (1, LEVEL, 4)}
    stores["auto"] = f"cachegen:level=auto,deadline={PATIENCE},{coded}"
    (entry,) = loads.lone(1024, 2)(lab.asked("pocket"))
    return stored.times(lab, "pocket", entry.prompt, stores, bandwidth)


def listed(found: dict[str, tuple[float, int]]) -> str:
    return ", ".join(f"{who} {seconds:.2f} s ({size / 1e6:.1f} MB)" for who, (seconds, size) in found.items())


def sooner(lab: Lab) -> AttemptOutcome:
    """A slow link: loading at each level against 8 bits, raw rows, and computing."""
    found = loading(lab, SLOW)
    times = found["8 bits"][0] / found[f"level {LEVEL}"][0]
    return AttemptOutcome(times >= SOONER, f"{times:.2f} times; {listed(found)}")


def followed(lab: Lab) -> AttemptOutcome:
    """Levels that each block chooses by what those before it took: a slow link, and a fast disk."""
    slow, fast = loading(lab, SLOW), loading(lab, FAST)
    smaller = slow["auto"][1] < fast["auto"][1]
    return AttemptOutcome(smaller and slow["auto"][0] < slow["raw"][0], f"slow: {listed(slow)}; fast: {listed(fast)}")


ON = Setting({**APART, "store": f"cachegen:level={LEVEL}"})
AS_IS, ALLOWED = Setting(APART), 0.05  # rows as they are; the paper keeps 0.98 of the accuracy
ANY = Setting(APART, {"store": Coarse(1)})
SYSTEM = System(
    title="CacheGen",
    paper=Paper("CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving", "2310.07240"),
    claim="KV coded per layer and channel is 3.5 to 4.3 times smaller than in 8 bits, at an accuracy of 0.98 of the "
    "original, so that contexts load 3.2 to 3.7 times faster over links of 0.1 to 10 Gbit/s.",
    conditions=("Mistral-7B, Llama-34B and 70B", "LongChat, TriviaQA and others, contexts of thousands of tokens",
                "stored contexts streamed over a network"),
    method=ON,
    baseline=Setting({**APART, "store": "int8"}),
    control=ANY,
    control_is="the same coder with three levels for every number: smaller still, and no longer the context",
    line="KV coded to its entropy: 3.5 to 4.3 times smaller than int8, 3.2 to 3.7 times faster to load, "
    "0.98 of the accuracy",
    promises=("answers", "cost", "time"),
    load=loads.answering("recall@1k", "passkey@1k", n=8),
    counters=(
        Counter("hand-offs", "one per request", lambda case: case.work.handoffs, lambda case: len(case.entries)),
        Counter("KV bytes sent as they are", "rows of the prompts x bytes of a row",
                lambda case: case.work.kv_bytes_sent, lambda case: loads.prompt_rows(case) * case.row_bytes,
                load=loads.answering("recall@1k", n=8), who=Setting({**APART, "store": "cachegen:level=0"})),
        Counter("KV bytes sent in 8 bits", "half of them, and a bfloat16 scale per row, head, keys and values",
                lambda case: case.work.kv_bytes_sent,
                lambda case: loads.prompt_rows(case) * (case.row_bytes // 2 + scales(case)),
                load=loads.answering("recall@1k", n=8), who=Setting({**APART, "store": "int8"})),
    ),
    savings=(Saving("KV bytes sent", lambda case, run: run.work.kv_bytes_sent, "baseline", 3.5),),
    attempts=(
        Attempt("mechanism", f"nats by which a token's loss goes off, levels 1 to {len(LEVELS)}",
                f"more with each, no mean that falls, and the finest's within {CLOSE}", ladder),
        Attempt("time", f"a stored context over {SLOW / 1e6:.0f} MB/s (simulated), level {LEVEL} against 8 bits",
                f"at least {SOONER} times sooner", sooner),
        Attempt("mechanism", f"levels within a load, {SLOW / 1e6:.0f} and {FAST / 1e6:.0f} MB/s (simulated)",
                "fewer bytes over the slow one, and there sooner than raw rows", followed),
        Attempt("counter", "error of a number", "at most half a step of its row, and bfloat16's rounding", off),
        Attempt("control", "bits per number, tables included",
                "at least the entropy per layer and channel, and below that of one histogram for all", coded, "cost"),
    ),
    quality=tuple(replace(each, baseline=AS_IS) for each in long_texts(always(ON), always(ANY), points=ALLOWED)),
    timings=(Timing("seconds to the second token of 1,024 tokens, coded, sent and decoded (no slow link between)",
                    seconds=lambda run: run.seconds, load=loads.lone(1024, 2), price=True),),
)  # fmt: skip
