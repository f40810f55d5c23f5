"""LQ-LoRA: each matrix as few bits plus low rank, the kinds of bits chosen by an integer programme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phasewise.bench.stats import means
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.models import ALLOCATED, LOW_RANK
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Counter,
    Paper,
    Quality,
    Setting,
    System,
    Timing,
)
from phasewise.train.lq_job import matrices_of

PROMPT, NEW = 256, 16  # tokens
EXAMPLES, WINDOW = 48, 256
CODE = Quality(("code",), 0.02, EXAMPLES, window=WINDOW, alone=True)
ON, ZERO, LEVELS, SPLIT, RANDOM = (
    Setting(model=f"pocket-lq{by}") for by in ("", "-zero", "-levels", "-split", "-random")
)


def last(run: PlayedRun) -> int:
    """KV bytes before the last token."""
    return run.steps[-2].kv


def told(lab: Lab, setting: Setting) -> dict[str, Any]:
    """What the conversion of a model said of its errors."""
    found: dict[str, Any] = json.loads((Path(lab.shelf.path(lab.real(setting.model))) / ALLOCATED).read_text())
    return found


def held(lab: Lab) -> AttemptOutcome:
    """Bytes that the linear layers of a loaded model hold, of those of the dense one; all else is alike in both."""
    dense, ours = lab.model("pocket"), lab.model(ON.model)
    layers = 2 * sum(each.shape[0] * each.shape[1] for each in matrices_of(dense.config, LOW_RANK.rank))  # bfloat16
    now = ours.weight_bytes - (dense.weight_bytes - layers)
    return AttemptOutcome(
        now <= layers * LOW_RANK.bits / 16, f"{now:,} of {layers:,} bytes, {16 * now / layers:.2f} bits"
    )


def allocated(lab: Lab) -> AttemptOutcome:
    found = told(lab, ON)
    return AttemptOutcome(
        found["chosen"] < found["same"], f"{1 - found['chosen'] / found['same']:.1%} less than {found['kind']} for all"
    )


def error_against_levels(lab: Lab) -> AttemptOutcome:
    ours, theirs = told(lab, ON)["error"], told(lab, LEVELS)["error"]
    return AttemptOutcome(ours < theirs, f"{ours / theirs:.2f} times that of levels alone")


def directions(lab: Lab) -> AttemptOutcome:
    """Code loss before any training: the pairs of the method, against as many directions drawn by chance."""
    n = lab.scale.examples or (6 if lab.scale.quick else EXAMPLES)
    lead = means(losses(lab, SPLIT, CODE, n), losses(lab, RANDOM, CODE, n))
    return AttemptOutcome(lead.low > 0, f"{lead.text(False)} per token of {n} stretches of code")


SYSTEM = System(
    title="LQ-LoRA",
    paper=Paper("LQ-LoRA: Low-rank Plus Quantized Matrix Decomposition for Efficient Language Model Finetuning",
                "2311.12023"),
    claim="a matrix in few bits plus a low-rank pair, found in turns and with bits allocated by an integer programme, "
    "does better than quantising alone and than QLoRA's pairs at as many bits; 2.75 bits a weight of LLaMA-2-70B are "
    "competitive with full precision.",
    conditions=("LLaMA-2 7B and 70B, RoBERTa-large", "rank 64: about 0.1 bit a weight there", "2.5 to 4 bits a weight, "
                "NormalFloat", "pairs fine-tuned on C4"),
    method=ON,
    baseline=Setting(),
    control=RANDOM,
    control_is="pairs of the same rank in directions drawn by chance, and the matrix less what they hold in few bits. "
    "It is held against the method's pairs before anything is trained: a control that was trained less could not win",
    line="few bits plus low rank, found in turns: better than few bits alone at the same size",
    promises=("answers", "cost"),
    load=loads.lone(PROMPT, NEW),
    missing=("2.5 to 4 bits: no kind with kernels here has fewer than 4.13",),
    counters=(
        Counter("KV bytes held before the last token", "(prompt + decoded rows) x bytes of a row: weights change no KV",
                lambda case: last(case.method), lambda case: (loads.prompt_rows(case) + NEW - 2) * case.row_bytes),
    ),
    quality=(Quality(("code",), CODE.allowed, EXAMPLES, window=WINDOW, alone=True,
                     rivals={"levels alone in as many bits": LEVELS,
                             "pairs from zero (QLoRA), trained as long": ZERO}),),
    attempts=(
        Attempt("cost", "bytes of all linear layers", f"at most {LOW_RANK.bits:g} bits a weight, pairs included", held),
        Attempt("mechanism", "squared error of the allocation", "below the best single kind of that size", allocated),
        Attempt("mechanism", "squared error at equal bits, pairs included", "below levels alone", error_against_levels),
        Attempt("control", "likelihood of code before training, less that of random directions", "all of it above 0",
                directions, "answers", "pocket"),
    ),
    timings=(Timing("time per token, one request", 1.0, seconds=loads.pace, load=loads.lone(PROMPT, 64), price=True),),
    note=f"Errors are weighed by squared gradients. {LOW_RANK}: pairs of rank {LOW_RANK.rank} take 0.33 bits a weight "
    "of pocket, three times their share in the paper. Levels alone have their kinds allocated too. Pairs that are "
    "trained have the best of three rates each, by their divergence over six windows of held-out source.",
)  # fmt: skip
