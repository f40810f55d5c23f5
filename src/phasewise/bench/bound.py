"""Compares what verifiers accept of several guesses with the most that any could (arXiv 2502.18779), on the
distributions of a model and one that guesses for it.

A model writes by chance; then both say, token by token, what they held likely there. Nothing is drawn but the text:
acceptance is computed from p and q (bench/acceptance.py), so differences of a tenth of a point are seen on a few
hundred tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.bench import acceptance
from phasewise.bench.drive import Bench
from phasewise.bench.questions import Asked
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Drawn
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Context, Dist, Purpose, Sample, uniform
from phasewise.verbs.traits import Traits

Form = Callable[[Tensor, Tensor, int], float]


@dataclass(frozen=True)
class VerifierOdds:
    """A verifier on guesses drawn in one way: how often it accepts one of n, and how often the best one would."""

    drawn: Drawn
    verify: str
    best: Form
    reached: Form | None = None  # None: on average over draws


RULES = (
    VerifierOdds("iid", "rejection", acceptance.best_independent, acceptance.independent),
    VerifierOdds("iid", "k_seq", acceptance.best_independent, acceptance.together),
    VerifierOdds("without_replacement", "rejection", acceptance.best_distinct),
    VerifierOdds("top_plus_one", "rejection", acceptance.top_plus_one, acceptance.top_plus_one),
    VerifierOdds("point", "match", acceptance.chosen, acceptance.chosen),
)


@dataclass
class RecordedSample(Method, Sample):
    """A `sample` for one request at a time: it writes `script`, and keeps what the model held likely at each place."""

    temperature: float
    script: list[int] = field(default_factory=list)
    rows: dict[int, Tensor] = field(default_factory=dict)  # position -> float64 [V]

    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    traits: ClassVar[Traits] = Traits("sample")

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        top = []
        for row, context in zip(logits.double(), contexts):
            self.rows[context.position] = (row / self.temperature).softmax(-1)
            top.append(self.script[context.position])
        return Dist(top, logits.shape[-1])


@dataclass(frozen=True)
class Pair:
    """A model and one that guesses for it, each in an engine that writes what it is told. Raises UserError where their
    vocabularies differ."""

    target: tuple[Placed, RecordedSample]
    second: tuple[Placed, RecordedSample]

    @classmethod
    def of(cls, target: Bench, second: Bench, limits: Limits, temperature: float, verbs: Mapping[str, str]) -> Pair:
        ours, theirs = target.model.config.vocab, second.model.config.vocab
        if ours != theirs:
            raise UserError(
                f"the model has {ours:,} tokens in its vocabulary, the one that guesses {theirs:,}: "
                "give --second one made for the same tokenizer"
            )
        records = [RecordedSample(temperature) for _ in range(2)]
        return cls(
            (target.engine(dict(verbs), limits, sample=records[0]), records[0]),
            (second.engine({}, limits, sample=records[1]), records[1]),
        )

    def nodes(self, text: Sequence[int], start: int, step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(position, p, q) of every `step`th token of a text from `start` on."""
        p, q = (held(engine, record, text, start) for engine, record in (self.target, self.second))
        for position in range(start, len(text), step):
            yield position, p[position], q[position]

    def close(self) -> None:
        for engine, _ in (self.target, self.second):
            engine.close()


def held(engine: Placed, record: RecordedSample, text: Sequence[int], start: int) -> dict[int, Tensor]:
    """The distributions of the engine's model at every place of a text from `start` on. Raises UserError if it
    fails."""
    record.script, record.rows = [*text, 0], {}
    request = Request(text[:start], Params(max_tokens=len(text) - start, ignore_eos=True))
    _ended(engine, [request])
    return record.rows


def texts(engine: Placed, asked: Asked, params: Params) -> list[tuple[str, int, list[int]]]:
    """(task, where its answer begins, text) of every question, each answered with random numbers of its own. Raises
    UserError if one fails."""
    prompts = [(task, prompt) for task, group in asked.items() for prompt in group]
    requests = [Request(prompt, replace(params, seed=params.seed + i)) for i, (_, prompt) in enumerate(prompts)]
    _ended(engine, requests)
    return [(task, len(prompt), list(r.tokens)) for (task, prompt), r in zip(prompts, requests, strict=True)]


def _ended(engine: Placed, requests: Sequence[Request]) -> None:
    with torch.inference_mode():
        for request in requests:
            engine.add(request)
        while any(request.left is None for request in requests):
            engine.step()
    for request in requests:
        if request.left is None or request.left.how != "finished":
            raise UserError(f"a text could not be written: {request.left and request.left.reason}")


@dataclass(frozen=True)
class GuessOdds:
    """One place in a text: how often one of so many guesses is accepted there by a rule, and could be at best."""

    task: str
    text: int
    position: int
    guesses: int
    drawn: Drawn
    verify: str
    accepted: float
    best: float


def measured(p: Tensor, q: Tensor, guesses: Sequence[int], place: tuple[str, int, int]) -> list[GuessOdds]:
    """All rules at one place, (task, text, position); p and q float64 [V]. What has to be drawn hangs on the place."""
    found = []
    for n in guesses:
        index, (_, text, position) = count(), place
        drawn = acceptance.distinct(p, q, n, lambda: uniform(text, position, Purpose.METHOD, next(index)))  # noqa: B023
        for rule in RULES:
            accepted = drawn if rule.reached is None else rule.reached(p, q, n)
            found.append(GuessOdds(*place, n, rule.drawn, rule.verify, accepted, rule.best(p, q, n)))
    return found
