"""Texts that a target model writes itself: prompts, its continuations of them in a file, and batches of these to learn
from.

Half of the continuations are greedy, half drawn at temperature 1, where the cross-entropy of a draft over them is, up
to a constant, its Kullback-Leibler divergence from the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.request.params import Params
from phasewise.train.dense import TokenBlock
from phasewise.train.mixture import Stage, in_blocks, size
from phasewise.train.tasks import TASKS, held_out, turns
from phasewise.train.tokenizer import plain
from phasewise.train.wording import Piece, Templated

TOGETHER = 64  # prompts that are continued, and saved, at a time
Prompts = Callable[[int], list[int]]
"""The token ids of prompt number i, a function of i alone."""


@dataclass(frozen=True)
class WrittenText:
    """A prompt and what the target wrote after it, its end token included, as token ids."""

    prompt: list[int]
    reply: list[int]


def of_mixture(wording: Templated, stream: Sequence[int], longest: int, seed: int, evaluation: bool) -> Prompts:
    """Stretches of source and questions of all tasks in turn. `stream`: token ids of source of the same part."""
    tasks = sorted(TASKS)

    def prompt(i: int) -> list[int]:
        rng = Random(f"{seed} {evaluation} prompt {i}")
        if i % 2:
            task = tasks[i // 2 % len(tasks)]
            first = turns(task, rng, rng.randint(32, max(33, longest // 2)), evaluation)[0]
            return wording.chat([first], None)[0][0][-longest:]
        length = rng.randint(8, max(9, longest - len(wording.begin)))
        start = rng.randrange(max(1, len(stream) - length))
        return wording.begin + [int(token) for token in stream[start : start + length]]

    return prompt


def of_file(wording: Templated, path: Path, longest: int, evaluation: bool) -> Prompts:
    """The lines of a file in turn: {"prompt": text}, {"messages": [...]} or {"turns": [text, ...]}, whose first is a
    user's message; one in 16, by hash, is held out.

    Raises UserError for a line that is none of these, and if there are no lines of that part.
    """
    ids: list[list[int]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip() and held_out(line) == evaluation:
            ids.append(_asked(wording, line, f"{path}, line {number}")[-longest:])
    if not ids:
        part = "held out (one line in 16 is)" if evaluation else "left to learn from"
        raise UserError(f"{path}: of its {len(lines)} lines none is {part}: give more of them")
    return lambda i: ids[i % len(ids)]


def _asked(wording: Templated, line: str, where: str) -> list[int]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return wording.begin + plain(wording.tokenizer, value["prompt"])
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return wording.ask(value["messages"])
    said = value.get("turns") if isinstance(value, dict) else None
    if isinstance(said, list) and said and isinstance(said[0], str):
        return wording.ask([{"role": "user", "content": said[0]}])
    raise UserError(f'{where} has neither a text "prompt" nor a list "messages" or "turns"')


def collect(
    llm: LLM, prompts: Prompts, path: Path, asked: Params, count: int, tell: Callable[[int], object] | None = None
) -> list[WrittenText]:
    """`count` continuations, kept in `path`; those that are there already are not written again.

    `asked.temperature` is that of half of them; the rest are greedy. `tell` hears how many there are, whenever there
    are more. Raises UserError where the target fails.
    """
    found = kept(path)[:count]
    while len(found) < count:
        numbers = range(len(found), min(count, len(found) + TOGETHER))
        given = [prompts(i) for i in numbers]
        outputs = llm.generate(given, [_drawn(asked, i) for i in numbers])
        broken = next((output.left for output in outputs if output.left.how != "finished"), None)
        if broken is not None:
            raise UserError(f"the target cannot continue a prompt: {broken.reason}")
        found += [WrittenText(prompt, list(output.tokens)) for prompt, output in zip(given, outputs, strict=True)]
        _keep(path, found)
        if tell is not None:
            tell(len(found))
    return found


def _drawn(asked: Params, i: int) -> Params:
    greedy = Random(f"{asked.seed} temperature {i}").random() < 0.5
    return replace(asked, temperature=0.0 if greedy else asked.temperature, seed=asked.seed + i)


def kept(path: Path) -> list[WrittenText]:
    """The texts of a file of `collect`; none where there is no such file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [WrittenText(**json.loads(line)) for line in lines]


def _keep(path: Path, texts: Sequence[WrittenText]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(vars(text)) + "\n" for text in texts), encoding="utf-8")
    fresh.replace(path)


class WrittenBatches:
    """Batches of what the target wrote. Replies are learned, and with `prompts` what they answer as well. A function of
    the seed and the step."""

    def __init__(self, texts: Sequence[WrittenText], pad: int, seed: int, prompts: bool = False) -> None:
        self.rows: list[list[Piece]] = [[(text.prompt, prompts), (text.reply, True)] for text in texts]
        self.pad, self.seed = pad, seed
        self.tokens = sum(map(size, self.rows))

    def step(self, step: int, stage: Stage) -> list[TokenBlock]:
        rng, rows, budget = Random(f"{self.seed} written {step}"), list[list[Piece]](), stage.step_tokens
        while budget > 0:
            rows.append(rng.choice(self.rows))
            budget -= size(rows[-1])
        return in_blocks(rows, self.pad)
