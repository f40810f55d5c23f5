"""A model with its methods, measured: one engine that answers, and one that is made to write given text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from phasewise.bench import quality
from phasewise.bench.drive import Bench
from phasewise.bench.forced import STRETCH, Forced, follow, forced_loss, write
from phasewise.bench.quality import Row, RowScores
from phasewise.bench.rows import agreement, calls, index, later
from phasewise.bench.rows.agreement import AGREEMENT, NEW, Free
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

Tell = Callable[[int], object]


class Judge:
    """Measures `llm`'s model with the methods named in `verbs`; `llm` itself must have the default ones.

    Per task, `answers` has what was answered (tokens), `found` the rows with a value for each example, and `asked` what
    was computed for them: each prompt, and how many tokens were to come after it.
    """

    def __init__(self, llm: LLM, verbs: Mapping[str, str]) -> None:
        self.llm, self.forced, bench = llm, Forced(), Bench(llm.model)
        self.engine = bench.engine(dict(verbs), llm.limits)
        self.writer = bench.engine(dict(verbs), llm.limits, sample=self.forced)
        self.answers: dict[str, list[list[int]]] = {}
        self.found: dict[str, list[RowScores]] = {}
        self.asked: dict[str, list[tuple[list[int], int]]] = {}
        self._texts: dict[tuple[int, ...], list[int]] = {}  # the default's, by prompt

    @property
    def losses(self) -> dict[str, list[float]]:
        """Nats per token of every example, of the tasks that have a loss."""
        return {task: rows[0].values for task, rows in self.found.items() if rows[0].row.unit == "nats/token"}

    def measure(self, task: str, examples: int, seed: int, tell: Tell, prompts: Path | None = None) -> list[Row]:
        """The rows of one task; `tell` is told how many examples are done.

        Raises UserError naming what keeps the task from being measured: its length, a model without a chat template or
        one that shows no tools, a decode method that has no loss, no file of `prompts`.
        """
        index.known([task], prompts)
        self.asked[task] = []
        subject = self._subject(task, tell)
        if task == AGREEMENT:
            assert prompts is not None
            self.found[task] = self._agreement(agreement.prompts(subject, prompts, Random(seed), examples), tell)
        elif task in calls.ROWS:
            self.found[task] = [calls.measure(task, subject, examples, seed)]
        elif task in later.ROWS:
            self.found[task] = [later.measure(task, subject, examples, seed)]
        elif task in index.GENERAL:
            self.found[task] = index.general(task, subject, examples, seed)
        else:
            if task in quality.ASKED and not subject.chats:
                raise UserError(f"{task} is asked through a chat template, and this model has none: leave it out")
            self.found[task] = self._generated(task, subject, examples, seed, tell)
        for engine in (self.engine, self.writer):
            engine.forget_prefixes()  # no row is helped, or kept from memory, by those before it
        return [one.row for one in self.found[task]]

    # ---- what rows need
    def _subject(self, task: str, tell: Tell) -> Subject:
        llm, done = self.llm, 0

        def generate(prompts: list[list[int]], room: int) -> list[list[int]]:
            self.asked[task] += [(prompt, room) for prompt in prompts]
            self.answers[task] = [request.out for request in free(self.engine, task, prompts, room, tell)]
            return self.answers[task]

        def losses(tokens: list[int], stretches: Sequence[range]) -> list[float]:
            nonlocal done
            self.asked[task] += [(tokens[: stretch.start], len(stretch)) for stretch in stretches]
            found = stretch_losses(self.writer, self.forced, tokens, stretches)
            done += 1
            tell(done)
            return found

        def going_on(jobs: Sequence[tuple[list[int], int]], room: int) -> list[list[int]]:
            self.asked[task] += [(text[:start], len(text) - start + room) for text, start in jobs]
            self.answers[task] = follow(self.writer, self.forced, jobs, room, llm.model.config.eos, tell)
            return self.answers[task]

        def encode(text: str) -> list[int]:
            return llm.tokenizer.encode(text, add_special=False)

        chat, begin = lambda messages: llm.encode_chat(messages), llm.tokenizer.begin
        text = quality.TextCodec(encode, llm.tokenizer.decode, chat, begin)

        def offer(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
            return llm.encode_chat(messages, {"tools": list(tools)})

        offers, chats = offer if llm.template.takes_tools else None, bool(llm.template.names)
        return Subject(generate, losses, going_on, text, self.engine.reach(""), chats, offers)

    def _generated(self, task: str, subject: Subject, examples: int, seed: int, tell: Tell) -> list[RowScores]:
        done = 0

        def loss(ids: list[int]) -> float:
            nonlocal done
            self.asked[task] += [(ids[:start], STRETCH) for start in range(1, len(ids), STRETCH)]
            nats = forced_loss(self.writer, self.forced, ids)
            done += 1
            tell(done)
            return nats

        return quality.measure(subject.generate, loss, subject.text, tasks=[task], examples=examples, seed=seed)

    def _agreement(self, asked: list[list[int]], tell: Tell) -> list[RowScores]:
        def base(prompts: list[list[int]]) -> list[list[int]]:
            missing = [prompt for prompt in prompts if tuple(prompt) not in self._texts]
            for prompt, request in zip(missing, free(self.llm.engine, AGREEMENT, missing, NEW, lambda done: None)):
                self._texts[tuple(prompt)] = request.out
            return [self._texts[tuple(prompt)] for prompt in prompts]

        def own(prompts: list[list[int]]) -> Free:
            before = copy.copy(self.engine.counters)
            self.asked[AGREEMENT] += [(prompt, NEW) for prompt in prompts]
            requests = free(self.engine, AGREEMENT, prompts, NEW, tell)
            work = self.engine.counters - before
            return Free([r.out for r in requests], [r.trace.counts for r in requests], work.drafted, work.accepted)

        def choices(prompts: list[list[int]], texts: list[list[int]]) -> list[list[int]]:
            jobs = [(prompt + text, len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
            return [written.choices for written in write(self.writer, self.forced, jobs)]

        return agreement.agreement(asked, base, own, choices)


@torch.inference_mode()  # once, instead of in every step
def free(engine: Placed, task: str, prompts: Sequence[list[int]], room: int, tell: Tell) -> list[Request]:
    """Greedy texts of at most `room` tokens, each up to the model's end token. Raises UserError if one fails."""
    requests = [Request(prompt, Params(max_tokens=room)) for prompt in prompts]
    try:
        for request in requests:
            engine.add(request)
        while any(request.left is None for request in requests):
            if engine.step():
                tell(sum(request.left is not None for request in requests))
    finally:
        for request in requests:
            engine.cancel(request)
    for request in requests:
        if request.left is None or request.left.how != "finished":
            raise UserError(f"{task}: an example failed: {request.left and request.left.reason}")
    return requests


def stretch_losses(engine: Placed, forced: Forced, tokens: list[int], stretches: Sequence[range]) -> list[float]:
    """Mean nats of each stretch of a text. The last goes first: its prompt holds all others, where it may be shared."""
    jobs = [(tokens[: stretch.stop], stretch.start) for stretch in stretches]
    found = [*write(engine, forced, jobs[-1:]), *write(engine, forced, jobs[:-1])]
    means = [sum(one.nats) / len(one.nats) for one in found]
    return [*means[1:], means[0]]
