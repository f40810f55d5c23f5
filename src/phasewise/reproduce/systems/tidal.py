"""TidalDecode: one layer picks the tokens that matter, the layers after it read those alone."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import Tensor

from phasewise.bench.picks import overlaps
from phasewise.bench.stats import means
from phasewise.engine.engine import Engine
from phasewise.methods.attend.tidal import Tidal
from phasewise.model.artefacts import load
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import long_texts
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.selected import RandomPicks
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Paper,
    Quality,
    Setting,
    System,
    Timing,
)
from phasewise.request.params import Params
from phasewise.request.request import Request

METHOD = Tidal(k=128, every=16, weights="auto")
SHARE = 8  # a part of so many of a text's rows is picked, whatever is judged or timed
KNOBS = f"k={METHOD.k},weights=auto"
ON = Setting({"attend": f"tidal:{KNOBS},every={METHOD.every}"})
NEVER = Setting({"attend": f"tidal:{KNOBS},every=0"})
NEW = 40
WHOLE = METHOD.dense + 2  # layers that read everything
WITHIN = 0.05  # nats per token
CODE = Quality(("code",), allowed=WITHIN, examples=8, window=640)


def sized(tokens: int) -> Tidal:
    return replace(METHOD, k=tokens // SHARE)


def chosen(tokens: int, which: str = "weights=auto") -> Setting:
    return Setting({"attend": f"tidal:k={sized(tokens).k},{which},every={METHOD.every}"})


def drawn(tokens: int) -> Setting:
    return Setting(objects={"attend": RandomPicks(sized(tokens))})


def read(case: Case, run: PlayedRun) -> int:
    """KV bytes of all decoded tokens, with what was computed once more."""
    return sum(step.read for step in run.steps if step.streams)


def closed(case: Case) -> int:
    """Layers that read everything, two of which read the keys once more, and k rows and the row itself elsewhere; in a
    step that computes rows once more, everything everywhere, and nothing else."""
    layers, prompt = case.config.layers, loads.prompt_rows(case)
    row, total = case.row_bytes // layers, 0
    for j in range(1, NEW):
        n = prompt + j
        less = (WHOLE * n + (layers - WHOLE) * (METHOD.k + 1)) * row + 2 * n * row // 2
        total += layers * n * row if j > 1 and (j - 1) % METHOD.every == 0 else less
    return total


def overlap(lab: Lab) -> AttemptOutcome:
    """On a text of 1,024 tokens: how much of each late layer's own choice the layers that pick have found."""
    model = lab.model("pocket", "float32")
    shared = overlaps(model, [lab.asked("pocket").code(1024)], METHOD.k)
    found = load(model, METHOD.artefact(model.config), "auto")["found"].tolist()
    choosing = METHOD.best(found).choosing(model.config.layers)
    late = range(choosing[-1] + 1, model.config.layers)
    first, second = (statistics.fmean(float(shared[a, b]) for b in late) for a in choosing)
    chance = METHOD.k / (1024 - 32)
    said = f"{first:.2f} by the first choice, {second:.2f} by the second, {chance:.2f} by chance"
    return AttemptOutcome(chance < first < second, said)


def corrected(lab: Lab) -> AttemptOutcome:
    """Keys and values below the last border, against those of a prompt of the same tokens, in float32."""
    prompt, most = lab.asked("pocket").code(300), 2 * METHOD.every + 4
    request = Request(prompt, Params(max_tokens=most + 2, ignore_eos=True))
    mine = _rows(lab, ON, request, most)
    truth = _rows(lab, Setting(), Request(request.tokens[: request.computed], Params(max_tokens=4)), 1)
    border = len(prompt) + (request.computed - 1 - len(prompt)) // METHOD.every * METHOD.every
    below = max(float((a - b)[:, :border].abs().max()) for a, b in zip(mine, truth))
    behind = max(float((a - b)[:, border : request.computed].abs().max()) for a, b in zip(mine, truth))
    said = f"at most {below:.1e} apart in {border - len(prompt)} corrected rows, {behind:.1e} in those after them"
    return AttemptOutcome(below < 1e-3 < behind, said)


def _rows(lab: Lab, setting: Setting, request: Request, tokens: int) -> list[Tensor]:
    """All keys and values of a request once it has so many new tokens."""
    with lab.engine(setting, dtype="float32") as engine, torch.inference_mode():
        assert isinstance(engine, Engine)
        engine.add(request)
        while request.n_out < tokens or request.known - request.computed > 1:
            engine.step()
        assert request.kv is not None
        parts = [layer.read()[0] for layer in request.kv.layers]
        found = [x.clone() for part in parts for x in (part.k, part.v)]
        engine.cancel(request)
    return found


def on_code(lab: Lab) -> AttemptOutcome:
    """Loss of held-out code, written token by token: with correction, less that of dense attention, and without."""
    n = min(CODE.examples, lab.scale.examples or CODE.examples)
    with_it, never, dense = (losses(lab, each, CODE, n) for each in (ON, NEVER, Setting()))
    apart, bare = means(with_it, dense), means(never, dense)
    said = f"{apart.text(False)} log-likelihood with correction; {bare.text(False)} without"
    return AttemptOutcome(apart.low > -WITHIN, said)


SYSTEM = System(
    title="TidalDecode",
    paper=Paper("TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention", "2410.05076"),
    claim="two layers that pick and hand their picks to the layers after them find a needle in 10K and 100K tokens in "
    "100 % of the cases with 128 rows, and decoding is up to 2.1 times as fast.",
    conditions=("Llama-2-7B, Llama-3-8B and their long-context versions of 32 layers, 4 of which read everything",
                "needle in a haystack, LongBench, PG19", "A100"),
    method=ON,
    baseline=Setting(),
    control=Setting(objects={"attend": RandomPicks(METHOD)}),
    control_is="as many rows in the same layers, its own among them, the others drawn at random per head",
    line="two layers pick for all: needles found with 128 rows of 10K, up to 2.1 times as fast",
    promises=("answers", "cost", "time"),
    load=loads.lone(768, NEW),
    missing=("models of 32 layers: half of the pocket model's read everything",),
    counters=(
        Counter("KV bytes read while decoding",
                "all rows in 4 layers, keys once more in 2, k + 1 rows elsewhere; all where rows are computed again",
                lambda case: read(case, case.method), closed),
        Counter("rows computed once more", "all decoded before the last border",
                lambda case: case.work.recomputed, lambda case: (NEW - 1) // METHOD.every * METHOD.every),
        Counter("rows run", "prompt + tokens - 1 + rows computed once more",
                lambda case: case.work.rows,
                lambda case: loads.prompt_rows(case) + NEW - 1 + (NEW - 1) // METHOD.every * METHOD.every),
    ),
    arithmetic=(KnobRatio("KV bytes read while decoding", read),),
    quality=long_texts(chosen, drawn),
    attempts=(
        Attempt("mechanism", "share of each late layer's own picks that was handed to it", "chance < first < second",
                overlap),
        Attempt("mechanism", "corrected rows against those of a prompt",
                "apart by less than 0.001, the others by more", corrected),
        Attempt("answers", "loss of code against dense attention", f"within {WITHIN} nats", on_code,
                model="pocket"),
    ),
    timings=(Timing("time per token at 8,192 tokens (8 layers x 512, random weights)", 1.0, model="random-dense",
                    tokens=8192, settings={"method": chosen(8192, "weights=random:0")}),),
    note="With correction a token costs two rows of the model: passes of many rows read the weights once. The layer "
    "that picks again was chosen as the paper does, by needles on other examples (`phasewise train artefact "
    "attend.tidal`): layer 5 of the pocket model's 8, where the default is layer 3.",
)  # fmt: skip
