"""Contrastive decoding: what the model knows and a smaller one does not is preferred."""

from __future__ import annotations

from phasewise.reproduce import loads
from phasewise.reproduce.panel import HOT, SHORT
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.system import Case, Counter, Paper, Quality, Setting, System, Timing

PROMPT, NEW = 256, 32
ALPHA, BETA = 0.1, 0.5  # the paper's, for reasoning


def against(amateur: str) -> Setting:
    return Setting({"decode": f"contrastive:amateur={amateur},alpha={ALPHA},beta={BETA}"})


def passes(case: Case, run: PlayedRun) -> int:
    return run.work.forwards


SYSTEM = System(
    title="Contrastive decoding",
    paper=Paper("Contrastive Decoding Improves Reasoning in Large Language Models", "2309.09117"),
    claim="logits of a large model, raised by half of what they exceed a small one's by, over the tokens that the "
    "large one finds plausible, answer up to 8 points more of GSM8K than greedy decoding does.",
    conditions=("LLaMA of 7B to 65B, an amateur of 1.5B", "GSM8K, other reasoning, HellaSwag", "alpha 0.1, beta 0.5"),
    method=against("pocket-draft"),
    baseline=Setting(),
    control=against("untrained-draft"),
    control_is="an amateur of the same shape with random weights: as much work, and nothing known is taken away",
    line="logits raised by what they exceed a small model's by: up to 8 points more of GSM8K than greedy decoding",
    promises=("answers",),
    load=loads.lone(PROMPT, NEW),
    missing=("open-ended text, of the first paper (arXiv 2210.15097)",),
    counters=(
        Counter("passes of the model", "one for each token: as without the amateur", lambda case: case.work.forwards,
                lambda case: case.runs["baseline"].work.forwards),
        Counter("passes of the amateur", "one for each of the model's", lambda case: case.work.draft_forwards,
                lambda case: case.work.forwards),
    ),
    quality=(Quality(SHORT, None, 60, gains=True), Quality(SHORT, None, 60, temperature=HOT, gains=True)),
    timings=(Timing("time per token at 512 tokens", tokens=512, price=True),),
    note="pocket-draft was trained on the same texts as the pocket model, a tenth as long.",
)  # fmt: skip
