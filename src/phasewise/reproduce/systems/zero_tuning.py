"""ZeroTuning: the attention that the first token draws is scaled in chosen heads."""

from __future__ import annotations

from functools import partial

from phasewise.bench.stats import means
from phasewise.load import files_of
from phasewise.methods.attend.zero_tuning import Tuned, ZeroTuning
from phasewise.model.artefacts import load
from phasewise.ops import native
from phasewise.reproduce import loads
from phasewise.reproduce.controls import OtherWay
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import HOT, SHORT
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Quality, Setting, System, Timing
from phasewise.reproduce.workload import STRANGER
from phasewise.train.artefacts.attend_zero_tuning import mean_loss, validation
from phasewise.train.mixture import of_model

PROMPT, NEW = 256, 32
ON = Setting({"attend": "zero_tuning"})
ALL = Setting({"attend": "zero_tuning:weights=none,gamma=2"})  # every head of every layer
EACH = 60  # examples of a task
DRAWN = 8192  # tokens of conversations and source for the other model


def read(case: Case) -> int:
    """All rows in every layer of every decoded token; without kernels the first once more."""
    again = native.library() is None
    return sum(loads.prompt_rows(case) + j + again for j in range(1, NEW)) * case.row_bytes


def replies_gain(lab: Lab, other: float) -> AttemptOutcome:
    """Replies to tasks on a model whose texts begin with what draws most of the attention: likelihood with its chosen
    heads and factor, less that with `other` times the logarithm of the factor. Of draws that nothing was chosen on."""
    model, files = lab.model(STRANGER, "float32"), files_of(STRANGER)
    lift = load(model, ZeroTuning().artefact(model.config), "auto")["lift"].float()
    drawn = validation(of_model(files, model.config.eos, lab.scale.seed + 1), 1024 if lab.scale.quick else DRAWN,
                       lab.scale.seed + 1)  # fmt: skip
    replies = [each for each in drawn if not all(each.learned)]
    mine, theirs = ([-mean_loss(model, [each], Tuned(by * lift)) for each in replies] for by in (1.0, other))
    gain = means(mine, theirs)
    return AttemptOutcome(gain.low > 0, f"{gain.text(False)} per token of {len(replies)} replies")


SYSTEM = System(
    title="ZeroTuning",
    paper=Paper("ZeroTuning: Unlocking the Initial Token's Power to Enhance Large Language Models Without Training",
                "2505.11739"),
    claim="one factor on the attention weight of the first token, in the heads that a validation set picks, improves "
    "Llama-3.1-8B by 19.9 % (relative) in classification, 4.5 % in question answering and 2.1 % in dialogue.",
    conditions=("Llama-3.1-8B and others that begin every text with a BOS token, which draws most of the attention",
                "15 data sets, heads and factor chosen for each of them"),
    method=ON,
    baseline=Setting(),
    control=Setting(objects={"attend": OtherWay()}),
    control_is="the same heads with every factor turned over: raised where the method lowers",
    line="the first token's attention scaled: 19.9 % better in classification, 4.5 % in questions",
    promises=("answers",),
    load=loads.lone(PROMPT, NEW),
    missing=("a factor for each task: one was chosen for all of them",),
    counters=(
        Counter("KV bytes read while decoding, every head scaled",
                "sum of prompt + j rows; without kernels the first once more",
                lambda case: sum(step.read for step in case.method.decoding), read,
                load=loads.lone(PROMPT, NEW, PROMPT), who=ALL),
    ),
    quality=(
        Quality(SHORT, None, EACH, gains=True),
        Quality(SHORT, None, EACH, temperature=HOT, gains=True),
        Quality(("code",), None, 24, window=320, gains=True),
    ),
    attempts=(
        Attempt("answers", f"likelihood of replies to tasks, {STRANGER}, method less dense", "all of it above 0",
                partial(replies_gain, other=0.0), model=STRANGER),
        Attempt("control", f"likelihood of replies to tasks, {STRANGER}, method less every factor turned over",
                "all of it above 0", partial(replies_gain, other=-1.0), "answers", STRANGER),
    ),
    timings=(Timing("time per token at 512 tokens", 1.0, tokens=512, price=True),),
    note="Heads and factor were chosen by `phasewise train artefact attend.zero_tuning` on fresh draws of the training "
    "mixture. Texts of the pocket model begin with its BOS token, <|begin|>. Those of smollm2 begin with the same "
    "tokens whenever they are conversations, and heads and factor were chosen on these: source becomes less likely "
    "with them.",
)  # fmt: skip
