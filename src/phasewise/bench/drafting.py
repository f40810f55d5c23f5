"""Drafters beside plain decoding on the same questions: tokens a pass, rows, passes, and the clock, paired.

Answers are as long as plain decoding's, which end where the model ends them: a text that rounding parts from it must
not be fast or slow by its length, over a prompt that counts once. With one request at a time every question is a round
of its own, which all contenders answer in rotating order; with more, all questions of a task are, at most so many at
once.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from phasewise import catalog
from phasewise.bench.drive import Bench
from phasewise.bench.questions import Asked
from phasewise.bench.rounds import order
from phasewise.bench.settings import BenchSetting
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

PLAIN = "plain"
WARM = 8  # tokens that every contender makes before it is timed
PERIOD, REPEATS = 32, 3  # an answer that ends in so many equal stretches of at most so many tokens loops
SHORTEST = 24  # tokens of such an end


def drafters() -> list[BenchSetting]:
    """Every drafter of the catalogue, as its knobs are by default."""
    return [BenchSetting(name, {"draft": name}) for name in catalog.names("draft")]


class DraftPrompt(NamedTuple):
    """A prompt, and how it is answered: greedily."""

    prompt: list[int]
    params: Params


@dataclass(frozen=True)
class Heat:
    """One contender's answers to some questions of a task, in one round."""

    setting: str
    task: str
    batch: int
    number: int
    seconds: float
    turns: int  # steps in which a request got tokens after its first, summed over requests
    work: Counters
    answers: list[list[int]]
    question: int = 0  # which of the task's it answers, or which group of them

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def rate(self) -> float:
        """Tokens a second, prompts included in the time."""
        return self.tokens / self.seconds

    @property
    def per_pass(self) -> float:
        """Tokens after the first of a request for each step that it had a part in: its mean accepted length."""
        return (self.tokens - len(self.answers)) / max(1, self.turns)


@dataclass
class Drafting:
    """Contenders against plain decoding. `refused` holds those that could not run, with the reason."""

    bench: Bench
    settings: Sequence[BenchSetting]
    limits: Limits
    tokens: int  # of an answer, at most
    base: dict[str, str] = field(default_factory=dict)  # verbs that all contenders share, plain decoding too
    heats: list[Heat] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def start(self, asked: Asked, batch: int) -> dict[str, Placed]:
        """An engine per contender, each warmed up. Raises UserError where a question and its answer are longer than the
        model's context."""
        self._check(asked)
        return self._engines(batch, next(iter(asked.values()))[0])

    def run(self, engines: Mapping[str, Placed], asked: Asked, batch: int, rounds: int) -> Iterator[int]:
        """Everything, at most `batch` requests at once; yields how many heats are done. Ends the engines."""
        try:
            yield from self._run(engines, asked, batch, rounds)
        finally:
            for engine in engines.values():
                engine.close()

    def _run(self, engines: Mapping[str, Placed], asked: Asked, batch: int, rounds: int) -> Iterator[int]:
        done = 0
        for task, prompts in asked.items():
            groups = [[prompt] for prompt in prompts] if batch == 1 else [list(prompts)]
            fixed = [self._fixed(engines[PLAIN], group) for group in groups]
            for number in range(len(groups) * rounds):
                question = number % len(groups)
                for name in order(list(engines), number):
                    engines[name].forget_prefixes()
                    heat = self._heat(name, task, batch, number, engines[name], fixed[question])
                    self.heats.append(replace(heat, question=question))
                    done += 1
                    yield done

    def _check(self, asked: Asked) -> None:
        context = self.bench.model.config.max_positions
        longest = max(len(prompt) for prompts in asked.values() for prompt in prompts)
        if longest + self.tokens > context:
            raise UserError(
                f"tokens={self.tokens} beside the longest question of {longest} tokens is more than the model's "
                f"context of {context}: lower --tokens, or leave long questions out"
            )

    def _engines(self, batch: int, warm: list[int]) -> dict[str, Placed]:
        """One per contender, plain decoding first. That must work; the others may refuse."""
        engines: dict[str, Placed] = {}
        limits = Limits(self.limits.budget, batch, self.limits.prefix_cache, self.limits.cluster)
        for setting in [BenchSetting(PLAIN), *self.settings]:
            try:
                engine = self.bench.engine({**self.base, **setting.verbs}, limits)
                answer(engine, [DraftPrompt(warm, Params(max_tokens=WARM))] * batch)
            except UserError as error:
                if setting.name == PLAIN:
                    raise
                self.refused[setting.name] = str(error)
            else:
                engines[setting.name] = engine
        return engines

    def _fixed(self, plain: Placed, prompts: Sequence[list[int]]) -> list[DraftPrompt]:
        """The prompts, each to be answered with as many tokens as plain decoding has for it, together with the others;
        not timed."""
        _, _, answers = answer(plain, [DraftPrompt(prompt, Params(max_tokens=self.tokens)) for prompt in prompts])
        return [
            DraftPrompt(prompt, Params(max_tokens=len(tokens), ignore_eos=True))
            for prompt, tokens in zip(prompts, answers, strict=True)
        ]

    def _heat(
        self, name: str, task: str, batch: int, number: int, engine: Placed, questions: Sequence[DraftPrompt]
    ) -> Heat:
        before = copy.copy(engine.counters)
        seconds, turns, answers = answer(engine, questions)
        return Heat(name, task, batch, number, seconds, turns, engine.counters - before, answers)


def answer(
    engine: Placed, questions: Sequence[DraftPrompt], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, int, list[list[int]]]:
    """-> seconds, steps that gave a request tokens after its first (summed), the answers. Raises UserError if one
    fails."""
    requests = [Request(question.prompt, question.params) for question in questions]
    made = {request.id: 0 for request in requests}
    turns, left, start = 0, len(requests), clock()
    with torch.inference_mode():
        for request in requests:
            engine.add(request)
        while left:
            for request in engine.step():
                turns += made[request.id] > 0 and request.n_out > made[request.id]
                made[request.id] = request.n_out
                left -= request.left is not None
    seconds = clock() - start
    for request in requests:
        if request.left is None or request.left.how != "finished":
            raise UserError(f"a question failed: {request.left and request.left.reason}")
    return seconds, turns, [list(request.out) for request in requests]


def loops(tokens: Sequence[int]) -> bool:
    """True if a text ends in a stretch that has come REPEATS times in a row. Such text is easily guessed and says
    little about drafters."""
    for period in range(1, PERIOD + 1):
        length = max(REPEATS * period, SHORTEST)
        end = tokens[-length:]
        if len(end) == length and all(end[i] == end[i - period] for i in range(period, length)):
            return True
    return False
