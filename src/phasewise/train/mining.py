"""Labels for judge heads without people: which of a draft's mistakes matter (AutoJudge, arXiv 2504.20039, algorithm 1).

The target answers a question greedily. At the first place where the draft would have said something else, the draft's
token takes its place, and the target writes the rest anew. If that is still right, the token was unimportant, and the
new answer takes the place of the old one; else it was important. Then the next place is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from phasewise.errors import UserError


@dataclass(frozen=True)
class MiningQuestion:
    """A prompt in token ids, and what tells a right answer."""

    prompt: list[int]
    right: Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class MinedToken:
    """A token of the draft in the target's answer: to which question and at which place of the answer, whether it was
    unimportant (`fine`), and the target's state at it [d], after the final norm."""

    question: int
    place: int
    fine: bool
    state: list[float]


class MiningModels(Protocol):
    """The target and the draft."""

    def answers(self, prompts: Sequence[list[int]], rooms: Sequence[int]) -> list[list[int]]:
        """The target's greedy continuations, each of at most so many tokens."""
        ...

    def states(self, texts: Sequence[list[int]]) -> list[list[float]]:
        """The target's state at the last token of each text, after the final norm."""
        ...

    def guesses(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[int]]:
        """The draft's likeliest token at each place of an answer, after the prompt and what is before."""
        ...


def mine(
    questions: Sequence[MiningQuestion], models: MiningModels, room: int, judged: int, ends: Collection[int] = ()
) -> list[MinedToken]:
    """The labels of all differences at the first `judged` places of answers of `room` tokens. Questions that the target
    answers wrongly are left out. Questions are numbered from 0. `ends`: tokens that end an answer."""
    answers = models.answers([one.prompt for one in questions], [room] * len(questions))
    live = [i for i, one in enumerate(questions) if one.right(answers[i])]
    places, guesses, fresh = [0] * len(questions), [list[int]()] * len(questions), live
    found: list[MinedToken] = []
    while live:
        prompts = [questions[i].prompt for i in fresh]
        for i, made in zip(fresh, models.guesses(prompts, [answers[i] for i in fresh])):
            guesses[i] = made
        for i in live:
            places[i] = _next(answers[i], guesses[i], places[i])
        live = [i for i in live if places[i] < min(judged, len(answers[i]))]
        begun = [[*answers[i][: places[i]], guesses[i][places[i]]] for i in live]
        texts = [questions[i].prompt + said for i, said in zip(live, begun)]
        states = models.states(texts)
        fresh = []
        for i, said, state in zip(live, _finished(begun, texts, models, room, ends), states):
            fine = questions[i].right(said)
            found.append(MinedToken(i, places[i], fine, state))
            places[i] += 1
            if fine:
                answers[i] = said
                fresh.append(i)
    return found


def _finished(
    begun: Sequence[list[int]], texts: Sequence[list[int]], models: MiningModels, room: int, ends: Collection[int]
) -> list[list[int]]:
    """Begun answers as the target ends them, of `room` tokens at most; `texts` are the questions with them."""
    said = [*begun]
    more = [k for k, each in enumerate(said) if each[-1] not in ends and len(each) < room]
    for k, rest in zip(more, models.answers([texts[k] for k in more], [room - len(said[k]) for k in more])):
        said[k] = said[k] + rest
    return said


def _next(answer: Sequence[int], guesses: Sequence[int], start: int) -> int:
    """The first place from `start` on where both differ; the answer's length where there is none."""
    differ = (at for at in range(start, len(answer)) if answer[at] != guesses[at])
    return next(differ, len(answer))


@dataclass
class MinedLabels:
    """What a run has mined so far: of the first `done` questions. `settings` must not change when it goes on."""

    settings: Mapping[str, Any]
    done: int = 0
    tokens: list[MinedToken] = field(default_factory=list)

    def take(self, more: Sequence[MinedToken], questions: int) -> None:
        """Labels of the next questions, which count from 0."""
        self.tokens += [MinedToken(self.done + one.question, one.place, one.fine, one.state) for one in more]
        self.done += questions

    def count(self, fine: bool) -> int:
        """The number of labels of a kind."""
        return sum(one.fine == fine for one in self.tokens)

    def save(self, path: Path) -> None:
        """Write all of it, in one piece: a line about the run, and a line for each token."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[Mapping[str, Any]] = [{"settings": dict(self.settings), "done": self.done}]
        lines += map(asdict, self.tokens)
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path, settings: Mapping[str, Any]) -> MinedLabels:
        """What `save` wrote. Raises UserError if that run had other settings, or if the file is none of a run."""
        try:
            first, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            before, done, tokens = first["settings"], first["done"], [MinedToken(**line) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} holds no labels that can be read ({error}); leave --resume out") from error
        for name in sorted(before.keys() | settings.keys()):
            if before.get(name) != settings.get(name):
                raise UserError(f"{path}: that run had {name}={before.get(name)!r}, this one has "
                                f"{settings.get(name)!r}: resume it as it was, or start anew elsewhere")  # fmt: skip
        return cls(settings, done, tokens)
