"""SWIFT: the model drafts for itself with sub-layers left out, which it looks for as it goes."""

from __future__ import annotations

from phasewise.engine.limits import Limits
from phasewise.llm import LLM
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.swift import Swift
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Blindly
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import PlayedRun
from phasewise.reproduce.stranger import FASTER, QUESTIONS
from phasewise.reproduce.system import Attempt, AttemptOutcome, Case, Counter, Paper, Saving, Setting, System, Timing
from phasewise.reproduce.workload import STRANGER
from phasewise.request.params import Params

RATIO, WINDOW, BRANCHES = 0.17, 8, 10
METHOD = Setting({"draft": f"swift:ratio={RATIO},window={WINDOW},branches={BRANCHES}"}, most=1)
CHAINS = Setting({"draft": f"swift:ratio={RATIO},window={WINDOW},branches=1"}, most=1)
LOAD = loads.answering("json", "arithmetic", "list", n=8)


def halves(layers: int) -> int:
    """Sub-layers of a guessing pass."""
    return 2 * layers - int(2 * (layers - 2) * RATIO)


def passed(case: Case, run: PlayedRun) -> float:
    """Layers whose weights are read per token after a request's first, those of guessing passes included."""
    return weights(run.work.forwards, run.work.draft_forwards, run.work.emitted, len(run.requests), case.config.layers)


def weights(whole: int, guessing: int, tokens: int, requests: int, layers: int) -> float:
    return ((whole - requests) * layers + guessing * halves(layers) / 2) / (tokens - requests)


def passes(case: Case, run: PlayedRun) -> float:
    """Per token."""
    return run.work.forwards / run.work.emitted


def verified(case: Case) -> int:
    """Rows that the whole model ran: of prompts, one of every other pass, and the guesses."""
    work = case.work
    return loads.prompt_rows(case) + work.forwards - len(case.entries) + work.drafted


def stranger(lab: Lab) -> AttemptOutcome:
    """On a model that nobody here has trained, with the defaults."""
    questions, tokens = (QUESTIONS[:1], 24) if lab.scale.quick else (QUESTIONS, 96)
    llm = LLM(STRANGER, limits=Limits(max_running=1), draft="swift:branches=1")
    for question in questions:
        llm.chat([{"role": "user", "content": question}], Params(max_tokens=tokens))
    work, layers = llm.engine.counters, llm.model.config.layers
    read = weights(work.forwards, work.draft_forwards, work.emitted, len(questions), layers)
    share = work.accepted / max(1, work.drafted)
    return AttemptOutcome(read < layers, f"{read:.1f} with the search, {share:.0%} of {work.drafted} guesses accepted")


SYSTEM = System(
    title="SWIFT",
    paper=Paper("SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration", "2410.06916"),
    claim="leaving out 45 % of the attentions and MLPs between the first and the last layer, which ones is looked for "
    "while text is generated, makes a drafter of the model itself, without training and without a second model: 1.3 to "
    "1.6 times as fast as plain decoding, tokens unchanged.",
    conditions=("LLaMA-2 13B and 70B, CodeLlama and others of 40 to 80 layers", "one request at a time, on A100",
                "summaries, reasoning, stories; code"),
    method=METHOD,
    baseline=Setting(most=1),
    control=Setting(objects={"decode": Speculative(Blindly(Swift(ratio=RATIO, branches=BRANCHES)), Match())}, most=1),
    control_is="as many sub-layers left out, whichever they are",
    line="the model drafts with layers left out: 1.3 to 1.6 times as fast, the same tokens",
    promises=("cost", "time"),
    load=LOAD,
    exact=True,
    counters=(
        Counter("passes of the model", "one per prompt, and tokens - first tokens - accepted guesses",
                lambda case: case.work.forwards, lambda case: case.work.emitted - case.work.accepted),
        Counter("guessing passes, without siblings",
                f"one per guess, and one for every {WINDOW} further rows: a set that is scored",
                lambda case: case.work.draft_forwards,
                lambda case: case.work.drafted + (case.work.rows - verified(case) - case.work.drafted) / WINDOW,
                load=LOAD, who=CHAINS),
        Counter("(row, layer) pairs", "all layers for rows that the whole model ran, half a pair for every sub-layer "
                "of the others", lambda case: case.work.row_layers,
                lambda case: verified(case) * case.config.layers
                + (case.work.rows - verified(case)) * halves(case.config.layers) // 2),
    ),
    savings=(
        Saving("layers read per token", passed, "baseline", 1.3),
        Saving("passes per token", passes, "control", 1.1),
    ),
    attempts=(
        Attempt("cost", f"layers read per token, {STRANGER}", "fewer than its thirty", stranger, model=STRANGER),
    ),
    timings=(
        Timing("time per token, the model padded to sixteen times the weights", 1.0, loads.pace, model="pocket-wide"),
        FASTER,
    ),
    note="The tree is the paper's: up to ten guesses for a token. The paper leaves out 45 % of 40 to 80 layers; of the "
    "pocket model's eight none is idle (docs/pocket.md): left out alone, one between the first and the last costs 0.04 "
    "to 0.47 nats of source. With 45 % left out more weights are read than without drafts; with 17 %, two sub-layers "
    "of twelve, hardly fewer. A verified row costs a pass, and its guess more than half of one: (row, layer) pairs per "
    "token are always more than a pass; what can become less is how often weights are read.",
)  # fmt: skip
