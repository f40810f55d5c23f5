"""Momentum decoding: greedy text that resists repeating itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import Any

from phasewise.bench.stats import means
from phasewise.methods.sample.momentum import LONGEST, Momentum, MomentumSampler
from phasewise.reproduce import loads
from phasewise.reproduce.controls import Control
from phasewise.reproduce.headroom import stranger_chat
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import finish
from phasewise.reproduce.stranger import QUESTIONS
from phasewise.reproduce.system import Attempt, AttemptOutcome, Counter, Paper, Setting, System, Timing
from phasewise.reproduce.workload import STRANGER
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from phasewise.verbs.sample import Context
from phasewise.verbs.traits import Traits

PROMPT, NEW, TEXTS, RUN = 128, 160, 16, 4  # tokens of a prompt and of a text, texts, tokens of a repeat
ON, GREEDY = Setting({"sample": "momentum"}), Setting()


@dataclass(frozen=True)
class RandomResistance(Control):
    """sample: as strong a resistance against as many of the likeliest tokens, drawn at random."""

    of: Momentum

    @property
    def traits(self) -> Traits:
        return self.of.traits

    def bind(self, host: Host) -> Any:
        return _Drawn(host, self.of)


class _Drawn(MomentumSampler):
    def _repeats(self, context: Context, token: int) -> int:
        request = context.request
        return Random(f"{request.prompt_len} {request.known} {len(context.path)} {token}").randint(0, LONGEST)


ANY = Setting(objects={"sample": RandomResistance(Momentum())})


def prompts(lab: Lab, model: str) -> list[list[int]]:
    """Beginnings to go on with: held-out code, or everyday questions where the model answers these."""
    if model == STRANGER:
        return [stranger_chat(question) for question in QUESTIONS]
    asked = lab.asked(model)
    return [asked.code(PROMPT) for _ in range(asked.size(TEXTS, 3))]


def written(lab: Lab, setting: Setting, model: str, temperature: float = 0.0) -> list[Request]:
    """Texts of one length; greedy ones unless a temperature is given."""
    new = 48 if lab.scale.quick else NEW
    requests = [
        Request(prompt, Params(new, temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(prompts(lab, model))
    ]
    with lab.engine(setting, model) as engine:
        finish(engine, requests)
    return requests


def repeated(tokens: Sequence[int]) -> float:
    """The share of runs of four tokens that a text has had before."""
    runs = [tuple(tokens[at : at + RUN]) for at in range(len(tokens) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs)


def likelihood(lab: Lab, texts: Sequence[Request], model: str) -> list[float]:
    """Log-likelihood per token of what was written, by the model itself."""
    asked = [Request(text.tokens[: text.prompt_len + text.n_out], Params(1, prompt_logprobs=1)) for text in texts]
    with lab.engine(GREEDY, model) as engine:
        finish(engine, asked)
    return [
        fmean(one.scores[at].logprob for at in range(text.prompt_len, one.prompt_len))
        for one, text in zip(asked, texts)
    ]


def less_repetition(lab: Lab, other: Setting, model: str) -> AttemptOutcome:
    """Repeated runs of another's texts, less those of momentum's."""
    theirs, mine = ([repeated(text.out) for text in written(lab, each, model)] for each in (other, ON))
    fewer = means(theirs, mine)
    words = f"{fewer.text(True)} ({fmean(theirs):.0%} and {fmean(mine):.0%} of {len(mine)} texts)"
    return AttemptOutcome(fewer.low > 0, words)


def coherent(lab: Lab, model: str) -> AttemptOutcome:
    """The model finds them likelier than what it draws itself at temperature 1, which repeats nothing either."""
    mine, drawn = written(lab, ON, model), written(lab, GREEDY, model, 1.0)
    gain = means(likelihood(lab, mine, model), likelihood(lab, drawn, model))
    return AttemptOutcome(gain.low > 0, f"{gain.text(False)} per token")


def on(model: str) -> tuple[Attempt, ...]:
    """The claim and its control on a model."""

    def fewer(other: Setting) -> Callable[[Lab], AttemptOutcome]:
        return partial(less_repetition, other=other, model=model)

    return (
        Attempt("answers", f"repeated runs of four tokens, {model}: greedy texts' less its own", "all of it above 0",
                fewer(GREEDY), model=model),
        Attempt("answers", f"likelihood of its texts, {model}, less that of drawn ones", "all of it above 0",
                partial(coherent, model=model), model=model),
        Attempt("control", f"repeated runs, {model}: those of a random resistance less its own", "all of it above 0",
                fewer(ANY), "answers", model),
    )  # fmt: skip


SYSTEM = System(
    title="Momentum decoding",
    paper=Paper("Momentum Decoding: Open-ended Text Generation As Graph Exploration", "2212.02175"),
    claim="greedy decoding that takes 0.2 off a token's probability for each token of the repeat it would make writes "
    "as well as contrastive search on three benchmarks of open-ended text, at a lower cost (no look-ahead pass).",
    conditions=("GPT-2 XL and others", "news, Wikipedia and stories", "MAUVE, diversity and coherence"),
    method=ON,
    baseline=GREEDY,
    control=ANY,
    control_is="as strong a resistance, against tokens drawn at random",
    line="greedy text that resists repeats: as good as contrastive search, and no look-ahead pass",
    promises=("answers",),
    load=loads.lone(PROMPT, 48),
    missing=("contrastive search", "MAUVE, and people's judgement"),
    counters=(
        Counter("passes of the model", "one for each token: as greedy", lambda case: case.work.forwards,
                lambda case: case.runs["baseline"].work.forwards),
        Counter("rows", "as greedy", lambda case: case.work.rows, lambda case: case.runs["baseline"].work.rows),
    ),
    attempts=(*on("pocket"), *on(STRANGER)),
    timings=(Timing("time per token at 512 tokens", tokens=512, price=True),),
)  # fmt: skip
