"""N:M sparse weights trained by mask decay: pruned weights fade out instead of being cut off."""

from __future__ import annotations

from phasewise.bench.stats import means
from phasewise.model.levels import matrices
from phasewise.model.nm import PATTERNS
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.models import SPARSE_STEPS
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

PROMPT, NEW = 256, 16  # tokens
EXAMPLES, WINDOW = 48, 256
CODE = Quality(("code",), None, EXAMPLES, window=WINDOW, alone=True)
PRUNED = {pattern: Setting(model=f"pocket-{pattern.replace(':', '-')}") for pattern in PATTERNS}
ON, SR_STE, MAGNITUDE, CHANCE = (
    Setting(model=f"pocket-1-8-{recipe}") for recipe in ("decay", "sr-ste", "magnitude", "chance")
)
MILD, MILD_SR_STE = (Setting(model=f"pocket-2-4-{recipe}") for recipe in ("decay", "sr-ste"))


def last(run: PlayedRun) -> int:
    """KV bytes before the last token."""
    return run.steps[-2].kv


def held(pattern: str, lab: Lab) -> AttemptOutcome:
    """Bytes that the linear layers of a loaded model hold, of those of the dense one; all else is alike in both."""
    dense, ours = lab.model("pocket"), lab.model(PRUNED[pattern].model)
    layers = 2 * sum(outputs * inputs for outputs, inputs in matrices(dense.config).values())  # bfloat16
    now = ours.weight_bytes - (dense.weight_bytes - layers)
    return AttemptOutcome(
        16 * now == layers * PATTERNS[pattern].bits, f"{now:,} of {layers:,} bytes, {16 * now / layers:g} bits"
    )


def examples(lab: Lab) -> int:
    return lab.scale.examples or (6 if lab.scale.quick else EXAMPLES)


def by_chance(lab: Lab) -> AttemptOutcome:
    """Code loss: the method, against masks that are drawn by chance and learned with as long."""
    n = examples(lab)
    lead = means(losses(lab, ON, CODE, n), losses(lab, CHANCE, CODE, n))
    return AttemptOutcome(lead.low > 0, f"{lead.text(False)} per token of {n} stretches of code")


def grows(lab: Lab) -> AttemptOutcome:
    """The lead over SR-STE at 1:8, less that at 2:4, in nats per token of code."""
    n = examples(lab)
    ours, theirs, mild, mild_theirs = (losses(lab, each, CODE, n) for each in (ON, SR_STE, MILD, MILD_SR_STE))
    high = [a - b for a, b in zip(ours, theirs)]
    low = [a - b for a, b in zip(mild, mild_theirs)]
    lead, at_2_4 = means(high, low), means(mild, mild_theirs)
    return AttemptOutcome(lead.low > 0, f"{lead.text(False)} more than at 2:4, where it is {at_2_4.text(False)}")


SYSTEM = System(
    title="N:M sparsity by mask decay",
    paper=Paper("Progressive Gradient Flow for Robust N:M Sparsity Training in Transformers", "2402.04744"),
    claim="weights that are pruned fade out while a transformer learns (mask decay), which keeps gradients clean: at "
    "over 80 % sparsity up to 2 % better in vision and 5 % in language than SR-STE, which cuts them off at once.",
    conditions=("ViT, SwinV2 and T5X, trained from scratch", "image classification, language understanding and "
                "translation", "dense steps first, then decay, then sparse ones"),
    method=ON,
    baseline=Setting(),
    control=CHANCE,
    control_is="1:8 masks drawn by chance that stay, with as many steps of training: if the choice and the fading of "
    "what is pruned were worth nothing, these would do as well",
    line="1 of 8 weights is left: those that are pruned fade out while the model learns, instead of being cut off",
    promises=("answers", "cost"),
    load=loads.lone(PROMPT, NEW),
    missing=("training from scratch: models here are trained already, and learn for minutes",),
    counters=(
        Counter("KV bytes held before the last token", "(prompt + decoded rows) x bytes of a row: weights change no KV",
                lambda case: last(case.method), lambda case: (loads.prompt_rows(case) + NEW - 2) * case.row_bytes),
    ),
    quality=(Quality(("code",), None, EXAMPLES, window=WINDOW, alone=True,
                     rivals={"SR-STE, trained as long": SR_STE, "magnitude alone, trained as long": MAGNITUDE}),),
    attempts=(
        Attempt("cost", "bytes of all linear layers at 2:4", "9/16 of bfloat16", lambda lab: held("2:4", lab)),
        Attempt("cost", "bytes of all linear layers at 1:4", "9/32 of bfloat16", lambda lab: held("1:4", lab)),
        Attempt("cost", "bytes of all linear layers at 1:8", "5/32 of bfloat16", lambda lab: held("1:8", lab)),
        Attempt("mechanism", "lead over SR-STE in the likelihood of code", "larger at 1:8 than at 2:4", grows),
        Attempt("control", "likelihood of code, less that of masks drawn by chance", "all of it above 0", by_chance,
                "answers", "pocket"),
    ),
    timings=(Timing("time per token, one request", 1.0, seconds=loads.pace, load=loads.lone(PROMPT, 64), price=True),),
    note=f"All are trained for {SPARSE_STEPS} steps of 2,048 tokens from the pocket model, at one rate that was not "
    "searched. How weights fade, and the shares of steps, are the best of a few tried on other held-out windows.",
)  # fmt: skip
