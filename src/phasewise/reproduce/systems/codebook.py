"""JLCM: codebooks that neurons share, learned together with the mapping of weights to their values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from phasewise.bench import stats
from phasewise.bench.divergence import compared, windows
from phasewise.load import files_of
from phasewise.model.levels import matrices
from phasewise.reproduce import loads
from phasewise.reproduce.answers import losses
from phasewise.reproduce.coded_models import BITS, GROUP, TOLD
from phasewise.reproduce.lab import Lab
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
WINDOWS, LONG = 12, 512  # of held-out source, over which divergences are taken
CODE = Quality(("code",), 0.02, EXAMPLES, window=WINDOW, alone=True)


def setting(name: str, bits: int | None = None) -> Setting:
    return Setting(model=f"pocket-{name}" + (f"-{bits}" if bits else ""))


ON, KMEANS, INT4 = setting("codebook", 4), setting("kmeans", 4), setting("int4")
FOUR_BITS = {  # of 4.13 to 4.5 bits a weight with their scales
    "even levels with the best scales": setting("uniform", 4), "int4": INT4, "int4 by GPTQ": setting("int4-gptq"),
    "NF4": setting("nf4"), "IQ4_NL": setting("iq4-nl"),
}  # fmt: skip


def last(run: PlayedRun) -> int:
    """KV bytes before the last token."""
    return run.steps[-2].kv


def told(lab: Lab, who: Setting) -> dict[str, Any]:
    """What the conversion of a model said of its bits and errors."""
    found: dict[str, Any] = json.loads((Path(lab.shelf.path(lab.real(who.model))) / TOLD).read_text())
    return found


def held(lab: Lab) -> AttemptOutcome:
    """Bytes that the linear layers of loaded models hold, against bits, scales and codebooks by their closed form."""
    dense, said, right = lab.model("pocket"), [], True
    sizes = matrices(dense.config).values()
    count = sum(outputs * inputs for outputs, inputs in sizes)
    for bits in BITS:
        model = lab.model(setting("codebook", bits).model)
        now = model.weight_bytes - (dense.weight_bytes - 2 * count)
        own = 4 if lab.scale.quick else bits  # of the stand-in
        claimed = count * (own + 16 / GROUP) / 8 + sum(-(-outputs // 64) * 2 * (1 << own) for outputs, _ in sizes)
        right &= now == claimed
        said.append(f"{now:,} bytes, {8 * now / count:.3f} bits")
    return AttemptOutcome(right, f"{'; '.join(said)} a weight, of {2 * count:,} bytes in bfloat16")


def divergences(lab: Lab, names: Sequence[str]) -> dict[str, list[float]]:
    """KL of models to the one in bfloat16, nats per token of each window, by name; each is read once."""
    count = 2 if lab.scale.quick else WINDOWS
    keys = {name: f"divergence of {name}, {count} windows" for name in names}
    if new := [name for name in names if keys[name] not in lab.grades]:
        texts = windows(files_of("pocket").tokenizer(), count, LONG, lab.scale.seed)
        models = {"": lab.model("pocket"), **{name: lab.model(name) for name in new}}
        found = compared(models, "", texts, lambda done: None)
        lab.grades |= {keys[name]: found[name].divergence for name in new}
    return {name: lab.grades[keys[name]] for name in names}


def nearer(bits: int, rivals: dict[str, Setting], lab: Lab) -> AttemptOutcome:
    """KL to the model in bfloat16, nats: of the method less than that of every rival, paired over windows."""
    ours = setting("codebook", bits).model
    found = divergences(lab, [ours, *(rival.model for rival in rivals.values())])
    mine, words, passed = found[ours], list[str](), True
    for name, rival in rivals.items():
        theirs = found[rival.model]
        lead = stats.means(theirs, mine)
        passed &= lead.low > 0
        words.append(f"{sum(theirs) / len(theirs):.4f} of {name}" + ("" if lead.low > 0 else " (no clear difference)"))
    return AttemptOutcome(passed, f"{sum(mine) / len(mine):.4f} nats; {', '.join(words)}")


def learns(lab: Lab) -> AttemptOutcome:
    """Squared errors of layers' outputs over the calibration texts: after learning over before, on the same inputs."""
    words, passed = [], True
    for bits in BITS:
        found = told(lab, setting("codebook", bits))
        shares = [(after / before) ** 2 for after, before in zip(found["after"], found["before"]) if before]
        passed &= max(shares) <= 1
        words.append(f"{sum(shares) / len(shares):.2f} (at most {max(shares):.2f}) with {bits} bits")
    return AttemptOutcome(passed, f"{', '.join(words)} times those by k-means")


def reordered(lab: Lab) -> AttemptOutcome:
    """Squared errors of outputs with neurons reordered over those with neurons as they were, means over layers; and
    the KL of both."""
    words, passed = [], True
    for bits in BITS:
        both = [setting(name, bits) for name in ("codebook", "in-place")]
        ours, theirs = (sum(each**2 for each in told(lab, who)["after"]) for who in both)
        near, other = (sum(each) / len(each) for each in divergences(lab, [who.model for who in both]).values())
        passed &= ours < 0.99 * theirs and near < other
        words.append(f"{ours / theirs:.3f} times with {bits} bits (KL {near:.4f} against {other:.4f})")
    return AttemptOutcome(passed, f"{', '.join(words)}")


def at(bits: int) -> dict[str, Setting]:
    """What has as many bits and does not learn."""
    return {
        "codebooks by k-means": setting("kmeans", bits),
        "even levels with the best scales": setting("uniform", bits),
    }


def added(lab: Lab) -> AttemptOutcome:
    """What codebooks add to learning: KL of the method, and of even levels whose scales and mapping learn likewise."""
    found = [nearer(bits, {"even levels": setting("even", bits)}, lab) for bits in BITS]
    words = [f"with {bits} bits {each.measured}" for bits, each in zip(BITS, found)]
    return AttemptOutcome(all(each.passed for each in found), "; ".join(words))


def likelier(bits: int, rivals: dict[str, Setting], lab: Lab) -> AttemptOutcome:
    """Code loss, nats per token: the lead over every rival on the same stretches of code."""
    n = lab.scale.examples or (6 if lab.scale.quick else EXAMPLES)
    mine, words, passed = losses(lab, setting("codebook", bits), CODE, n), list[str](), True
    for name, rival in rivals.items():
        lead = stats.means(mine, losses(lab, rival, CODE, n))
        passed &= lead.low > 0
        words.append(f"{lead.text(False)} against {name}")
    return AttemptOutcome(passed, f"{'; '.join(words)}, of {n} stretches of code")


SYSTEM = System(
    title="JLCM",
    paper=Paper("Network Memory Footprint Compression Through Jointly Learnable Codebooks and Mappings", "2309.17361"),
    claim="neurons that are distributed alike share a codebook, whose values are learned together with the mapping "
    "by a proximal search: a very efficient approximation of any network, with which Llama 7B takes 2 GB.",
    conditions=("computer vision and language models", "Llama 7B in 2 GB: about 2 bits a weight",
                "only the abstract and a summary were at hand"),
    method=ON,
    baseline=Setting(),
    control=KMEANS,
    control_is="codebooks by k-means for neurons as they lie: neither learned nor reordered, in as many bytes",
    line="learned codebooks of 2 to 4 bits: nearer to the model than other forms of equal bits",
    promises=("answers", "cost"),
    load=loads.lone(PROMPT, NEW),
    counters=(
        Counter("KV bytes held before the last token", "(prompt + decoded rows) x bytes of a row: weights change no KV",
                lambda case: last(case.method), lambda case: (loads.prompt_rows(case) + NEW - 2) * case.row_bytes),
    ),
    quality=(CODE,),
    attempts=(
        Attempt("cost", "bytes of all linear layers", "4, 3 or 2 bits, a scale per 128 inputs, codebooks", held),
        Attempt("mechanism", "squared error of layers' outputs", "below k-means' in each layer", learns),
        Attempt("mechanism", "reordering alone", "errors at least 1 % below those without, and KL too", reordered),
        Attempt("mechanism", "KL, codebooks against even levels that learn", "below theirs, whatever the bits", added),
        Attempt("answers", "KL with 4 bits", "below each rival of 4.13 to 4.5 bits", partial(nearer, 4, FOUR_BITS),
                model="pocket"),
        Attempt("answers", "KL with 3 bits", "below each rival of as many bits", partial(nearer, 3, at(3)),
                model="pocket"),
        Attempt("answers", "KL with 2 bits", "below each rival of as many bits", partial(nearer, 2, at(2)),
                model="pocket"),
        Attempt("answers", "likelihood of code with 3 bits", "above each rival of as many bits",
                partial(likelier, 3, at(3)), model="pocket"),
        Attempt("answers", "likelihood of code with 2 bits", "above each rival of as many bits",
                partial(likelier, 2, at(2)), model="pocket"),
        Attempt("control", "KL with 4 bits, k-means as they lie", "above the method's",
                partial(nearer, 4, {"k-means": KMEANS}), "answers", "pocket"),
        Attempt("control", "likelihood of code with 2 bits, k-means as they lie", "below the method's",
                partial(likelier, 2, {"k-means": setting("kmeans", 2)}), "answers", "pocket"),
    ),
    timings=(Timing("time per token, one request", 1.0, against="int4", seconds=loads.pace, load=loads.lone(PROMPT, 64),
                    settings={"int4": INT4}, price=True),),
    note="A scale for every 128 inputs of an output is added here, for the method and for even levels alike. The "
    "method reorders neurons as the paper says; `phasewise convert weights` does not unless it is asked.",
)  # fmt: skip
