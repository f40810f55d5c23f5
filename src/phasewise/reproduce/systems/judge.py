"""Judge Decoding, trained as AutoJudge has it: guesses that change no answer are accepted, whoever would say them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from phasewise.bench import stats
from phasewise.model.tokenizer import begun
from phasewise.reproduce import loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun, finish
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
    Value,
)
from phasewise.reproduce.workload import PromptSource, pocket_text
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.train.completions import Completion, drawn

K, ROOM = 8, 32  # guesses a pass, tokens of an answer
QUESTIONS, FEWEST, FEW = 1000, 12, 96  # graded, graded in a quick run, counted
ALLOWED, LEAST = 0.02, 1.3  # of the answers that may be lost, and times fewer passes
NEAR = 0.1  # contenders that take so nearly as many passes are of equal cost
NEAR_BEST = "top_beta"  # the rival


def drafting(verify: str) -> Setting:
    return Setting({"draft": f"draft_model:k={K}", "verify": verify})


# thresholds were chosen on 300 functions of files that are mined: 1.3 times fewer passes than exact, and as many
METHOD, BASELINE = drafting("judge:threshold=0.44"), drafting("rejection")
RANDOM = drafting("judge:weights=random:0,threshold=0.68")
RIVAL = drafting("top_beta:beta=64,tau=0.85")


@cache
def prompt(one: Completion) -> list[int]:
    text = pocket_text()
    return begun(text.encode(one.prompt), text.begin)


def completing(asked: PromptSource) -> list[LoadEntry]:
    """Functions of files that were never mined, each to be completed by as many tokens."""
    return [LoadEntry(prompt(one), ROOM) for one in drawn(asked.size(FEW, 3), asked.seed, evaluation=True)]


def passes(case: Case, run: PlayedRun) -> float:
    """Per token after a request's first: those that a request alone would take."""
    return sum(len(request.trace.counts) - 1 for request in run.requests) / sum(len(out) - 1 for out in run.outs)


def tokens(who: str, case: Case) -> Value:
    """A pass, after a request's first token."""
    return 1 / passes(case, case.runs[who])


def verified(case: Case) -> int:
    """Passes of the method's requests after their first tokens."""
    return sum(len(request.trace.counts) - 1 for request in case.method.requests)


def alone(who: Setting) -> Setting:
    """One request at a time."""
    return replace(who, most=1)


def right(lab: Lab, setting: Setting) -> list[float]:
    """1 for each question whose completion is valid Python and invents no name, else 0."""
    key = f"completions {setting!r}"
    if key not in lab.grades:
        n = lab.scale.examples or (FEWEST if lab.scale.quick else QUESTIONS)
        questions, text = drawn(n, lab.scale.seed, evaluation=True), pocket_text()
        requests = [Request(prompt(one), Params(ROOM)) for one in questions]
        with lab.engine(setting) as engine:
            finish(engine, requests)
        lab.grades[key] = [float(one.right(text.decode(done.out))) for one, done in zip(questions, requests)]
    return lab.grades[key]


def lead(other: Setting, border: float, lab: Lab) -> AttemptOutcome:
    """The method's right answers less those of another, on the same questions."""
    ours, theirs = right(lab, METHOD), right(lab, other)
    found, n = stats.shares(ours, theirs), len(ours)
    shares = f"{sum(ours) / n:.0%} and {sum(theirs) / n:.0%} of {n}"
    return AttemptOutcome(found.low > border, f"{found.text(True)}; {shares}", sum(right(lab, BASELINE)) / n)


SYSTEM = System(
    title="AutoJudge",
    paper=Paper("AutoJudge: Judge Decoding Without Manual Annotation", "2504.20039"),
    claim="a linear head on the target's states tells which of a draft's mistakes matter, from labels that are mined; "
    "the others are accepted: 1.3 to 2 times the tokens a pass of lossless speculative decoding, at answers within one "
    "or two points (GSM8K, Llama 3.1 70B with a draft of 8B). Judge Decoding (arXiv 2501.19309) has the head, with "
    "labels by people: 6.3 to 19.7 accepted tokens.",
    conditions=("Llama 3.2 1B for 3.1 8B, 3.1 8B for 70B, Qwen 2.5 0.5B for 7B", "GSM8K and LiveCodeBench, greedily",
                "answers with a final number or a program that runs, after hundreds of tokens of reasoning"),
    method=METHOD,
    baseline=BASELINE,
    control=RANDOM,
    control_is="a random head that accepts as many guesses",
    line="guesses that change no answer are accepted: 1.3 to 2 times the tokens a pass, answers within two points",
    promises=("answers", "cost", "time"),
    rivals={NEAR_BEST: RIVAL},
    load=completing,
    counters=(
        Counter("tokens after the first", "accepted guesses, and one for each pass",
                lambda case: case.work.emitted - len(case.entries), lambda case: case.work.accepted + verified(case)),
        Counter("tokens a pass, random head", "as the method's", partial(tokens, "control"), partial(tokens, "method"),
                within=NEAR),
        Counter(f"tokens a pass, {NEAR_BEST}", "as the method's", partial(tokens, NEAR_BEST), partial(tokens, "method"),
                within=NEAR),
    ),
    savings=(Saving("passes per token after the first", passes, "baseline", LEAST),),
    attempts=(
        Attempt("answers", "right completions, method less exact verification",
                f"all of it above -{ALLOWED * 100:g} points", partial(lead, BASELINE, -ALLOWED), model="pocket"),
        Attempt("answers", f"right completions, method less {NEAR_BEST}, which takes the same passes",
                "all of it above 0", partial(lead, RIVAL, 0.0), model="pocket"),
        Attempt("control", "right completions, method less a random head", "all of it above 0",
                partial(lead, RANDOM, 0.0), of="answers", model="pocket"),
    ),
    timings=(Timing("time per token", 1.0, loads.pace, settings={role: alone(who) for role, who in (
        ("method", METHOD), ("baseline", BASELINE))}),),
    missing=("answers drawn at a temperature, where typical acceptance would be the rival: greedily it is exact",),
    note="pocket's own tasks have checkers that forgive no wording. So functions of the library are completed, and a "
    "completion is right if it is valid Python and invents no name. None of the files that are asked about was mined; "
    "most of them the model has read. A thousand questions tell a loss of two points from none where about one answer "
    "in ten is another, and fewer questions do not.",
)  # fmt: skip
