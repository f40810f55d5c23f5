"""StreamingLLM: attention sinks and a moving window."""

from __future__ import annotations

import statistics
from dataclasses import replace

from phasewise.bench.forced import STRETCH, Forced, reaching, write
from phasewise.bench.stats import means
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.methods.evict._windows import EVERY
from phasewise.options import parse
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, play
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
from phasewise.reproduce.workload import STRANGER, PromptSource, code_ids, stretch_to

SINKS, WINDOW, TIMES = 4, 252, 20
FLAT = 0.05  # nats per token
LENGTH, SCORED, TEXTS = 1152, 16, 12  # tokens of a text, those at its end that are scored, and texts
BEYOND = 2  # contexts that dense attention reads
ON = Setting({"evict": f"streaming:sinks={SINKS},window={WINDOW}"})


NONE = Setting({"evict": f"streaming:sinks=0,window={SINKS + WINDOW}"})


def long(asked: PromptSource) -> list[LoadEntry]:
    return [LoadEntry(asked.code(32), asked.size(1200, 400))]


def recomputed(asked: PromptSource) -> list[LoadEntry]:
    """Every token from the last rows of the text alone, computed afresh."""
    return [LoadEntry(asked.code(SINKS + WINDOW), 1) for _ in range(asked.size(64, 4))]


def ends(lab: Lab, model: str) -> list[list[int]]:
    """Texts that end in different places of the held-out source, several windows long."""
    many = 2 if lab.scale.quick else TEXTS
    step = (len(code_ids(model)) - LENGTH) // many
    return [stretch_to(LENGTH + i * step, LENGTH, model) for i in range(many)]


def likelihoods(lab: Lab, setting: Setting, model: str) -> list[float]:
    """Minus the loss of the last tokens of each text, nats per token, where the engine has read all of it."""
    forced = Forced()
    with lab.engine(setting, model, sample=forced) as engine:
        written = write(engine, forced, [(text, LENGTH - SCORED) for text in ends(lab, model)])
    return [-statistics.fmean(each.nats) for each in written]


def afresh(lab: Lab, model: str) -> list[float]:
    """The same where each token is foretold from the last rows alone, computed anew, as many as the method keeps: the
    text's first token, which models expect, and those before the token."""
    forced, rows = Forced(), SINKS + WINDOW
    jobs = [
        ([text[0], *text[at - rows + 1 : at + 1]], rows) for text in ends(lab, model)
        for at in range(LENGTH - SCORED, LENGTH)
    ]  # fmt: skip
    with lab.engine(Setting(), model, sample=forced) as engine:
        nats = [each.nats[0] for each in write(engine, forced, jobs)]
    return [-statistics.fmean(nats[i : i + SCORED]) for i in range(0, len(nats), SCORED)]


def as_afresh(model: str) -> Attempt:
    def run(lab: Lab) -> AttemptOutcome:
        lead = means(likelihoods(lab, ON, model), afresh(lab, model))
        return AttemptOutcome(lead.low > -FLAT, f"log-likelihood {lead.text(False)}")

    name = f"likelihood of code behind {LENGTH - SCORED:,} tokens, {model}, less that of the window computed afresh"
    return Attempt("answers", name, f"all of it above -{FLAT} nats", run, model=model)


def above_plain(model: str) -> Attempt:
    def run(lab: Lab) -> AttemptOutcome:
        lead = means(likelihoods(lab, ON, model), likelihoods(lab, NONE, model))
        return AttemptOutcome(lead.low > 0, f"log-likelihood {lead.text(False)}")

    name = f"likelihood of code behind {LENGTH - SCORED:,} tokens, {model}, less that of the plain window"
    return Attempt("control", name, "all of it above 0", run, "answers", model)


def stream(lab: Lab) -> AttemptOutcome:
    """A text of twenty times the model's context (two, in a quick run)."""
    context = lab.model("pocket").config.max_positions
    asked, length = lab.asked("pocket"), context * (2 if lab.scale.quick else TIMES)
    with lab.engine(ON) as engine:
        run = play(engine, [LoadEntry(asked.code(length - 64), 64)], watch=False)
    written = len(run.outs[0])
    return AttemptOutcome(written == 64, f"{written} tokens after a text of {length - 64:,}")


def flat(lab: Lab) -> AttemptOutcome:
    """Stretches of code after one context of text and after twenty (two, in a quick run); and without sinks."""
    ids, context = code_ids(), lab.model("pocket").config.max_positions
    times, stretches = (2, 1) if lab.scale.quick else (TIMES, 4)
    if lab.model("pocket").config.vocab <= max(ids):
        return AttemptOutcome(False, "no code in this model's tokens")
    ends = [times * context + i * (len(ids) - times * context) // stretches for i in range(stretches)]

    def losses(setting: Setting, contexts: int) -> list[float]:
        texts, forced = [stretch_to(end, contexts * context) for end in ends], Forced()
        with lab.engine(setting, sample=forced) as engine:
            written = write(engine, forced, [(text, len(text) - STRETCH) for text in texts])
        return [statistics.fmean(each.nats) for each in written]

    near, far, bare = losses(ON, 1), losses(ON, times), losses(NONE, times)
    grown = statistics.fmean(b - a for a, b in zip(near, far))
    worse = statistics.fmean(b - a for a, b in zip(far, bare))
    said = f"{grown:+.3f} nats per token after {times} contexts ({worse:+.3f} without sinks)"
    return AttemptOutcome(abs(grown) <= FLAT, said)


def dense(lab: Lab) -> AttemptOutcome:
    """The same tokens of code after one context of text and after two, all of it read: the engine refuses that, and is
    told that the model's context is as long."""
    ids, model, stretches = code_ids(), lab.model("pocket"), 1 if lab.scale.quick else 4
    context = model.config.max_positions
    ends = [BEYOND * context + i * (len(ids) - BEYOND * context) // stretches for i in range(stretches)]

    def nats(contexts: int) -> list[float]:
        texts, forced = [stretch_to(end, contexts * context) for end in ends], Forced()
        far, methods = reaching(model, contexts * context), {**parse({}), "sample": forced}
        engine = Builder(far, methods, Limits(prefix_cache=False), load=lab.model).build()
        written = write(engine, forced, [(text, len(text) - STRETCH) for text in texts])
        return [one for each in written for one in each.nats]

    more = means(nats(BEYOND), nats(1))
    return AttemptOutcome(more.low > FLAT, f"{more.text(False)} per token")


SYSTEM = System(
    title="StreamingLLM",
    paper=Paper("Efficient Streaming Language Models with Attention Sinks", "2309.17453"),
    claim="four first tokens and a window of the last ones suffice for endless text in constant memory: perplexity "
    "5.40 where a plain window has 5,158 (Llama-2-13B, cache 1,024), stable over 4 million tokens, up to 22.2 times "
    "faster than computing the window afresh for every token.",
    conditions=("Llama-2, MPT, Falcon and Pythia of 2.8B to 70B", "PG19, texts far beyond the trained length",
                "models that have learned to attend to their first tokens"),
    method=ON,
    baseline=Setting(),
    control=NONE,
    control_is="a plain window of as many rows, without sinks",
    line="four sinks and a window: stable over 4 million tokens, 22.2 times as fast as recomputing",
    promises=("answers", "cost", "time"),
    load=long,
    counters=(
        Counter("KV rows held at most", "sinks + window + what waits to be dropped",
                lambda case: loads.held(case.method) / case.row_bytes, lambda case: SINKS + WINDOW + EVERY,
                bound="at most"),
    ),
    arithmetic=(KnobRatio("KV bytes held, at most", lambda case, run: loads.held(run)),),
    attempts=(
        *(each(model) for model in ("pocket", STRANGER) for each in (as_afresh, above_plain)),
        Attempt("mechanism", "a text of twenty times the context", "64 further tokens", stream),
        Attempt("answers", "loss of code after one context of text and after twenty", f"within {FLAT} nats", flat,
                model="pocket"),
        Attempt("mechanism", f"loss of code after {BEYOND} contexts, less that after one, where all of them is read",
                f"all of it above {FLAT} nats", dense),
    ),
    timings=(
        Timing("time per token, against computing the window afresh", 1.0, loads.per_token,
               settings={"baseline": replace(Setting(), most=1, load=recomputed)}),
        Timing("time per token at 1,500 tokens, against reading all", tokens=1500, price=True),
    ),
    note="Answers are the likelihood of text far behind its beginning, as in the paper, which promises no memory of "
    "what has left the window: no pass key there is found (docs/results/kv.md). A model that has not learned to attend "
    "to its first tokens loses nothing with them.",
)  # fmt: skip
