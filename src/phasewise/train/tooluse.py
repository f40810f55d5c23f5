"""Conversations in which a tool is offered: called for sums, left alone for the rest. Batches of them to learn from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from phasewise.model.chat import ChatTemplate
from phasewise.train.calculations import Problem, problem
from phasewise.train.chat import SYSTEM, talk
from phasewise.train.dense import Block
from phasewise.train.mixture import Mixture, Stage, in_blocks, size
from phasewise.train.tasks import Turn, turns
from phasewise.train.tokenizer import plain
from phasewise.train.toolbox import Offer, offer
from phasewise.train.wording import Piece

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "Tools:\n{% for tool in tools %}{{ tool['function'] | tojson }}{{ '\n' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": {{ call["function"]["name"] | tojson }}, "arguments": '
    '{% if call["function"]["arguments"] is string %}{{ call["function"]["arguments"] }}'
    '{% else %}{{ call["function"]["arguments"] | tojson }}{% endif %}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Without tools it writes what the pocket model's own template does."""

CALLS, ASIDE = 0.64, 0.12  # shares of a step's tokens: sums with a calculator at hand, other questions with one
OTHER_TASKS = ("copy", "reverse", "json", "edit", "list", "sort", "talk", "talk")
Messages = list[dict[str, Any]]


class Batch(NamedTuple):
    """`learned`: conversations with tools; `kept`: what the base model does without them, to be left as it is."""

    learned: list[Block]
    kept: list[Block]


def call(offer: Offer, expression: str) -> dict[str, Any]:
    """The assistant's message that calls the calculator."""
    function = {"name": offer.name, "arguments": {offer.parameter: expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def answered(offer: Offer, problem: Problem, told: str, result: str) -> Messages:
    """One sum from the question to the answer; `told`: what the tool says, in which `result` is the number."""
    return [
        {"role": "user", "content": problem.question},
        call(offer, problem.expression),
        {"role": "tool", "content": told},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]


def told(rng: Random, result: str) -> tuple[str, str]:
    """What a calculator may say, and the number in it."""
    kind = rng.random()
    if kind < 0.1 and "." not in result:
        return f"{result}.0", f"{result}.0"
    if kind < 0.2:
        return json.dumps({"result": float(result) if "." in result else int(result)}), result
    return (f"Result: {result}" if kind < 0.25 else result), result


class Conversations:
    """Batches of conversations with tools, and of the pocket model's own without: a function of seed and step."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.template = ChatTemplate({"default": TEMPLATE})

    def step(self, step: int, stage: Stage) -> Batch:
        rng = Random(f"{self.mixture.seed} tools {step}")
        calls = self._rows(rng, stage, CALLS, aside=False)
        aside = self._rows(rng, stage, ASIDE, aside=True)
        source = max(1, round(stage.step_tokens * stage.code / stage.row))
        kept, budget = [], stage.step_tokens * (1 - CALLS - ASIDE - stage.code)
        while budget > 0:
            row = self.mixture.short_row(rng, stage)
            if size(row) <= stage.row:
                kept.append(row)
                budget -= size(row)
        pad, plain_text = self.mixture.pad, self.mixture.source(rng, stage.row, source)
        return Batch(in_blocks(calls + aside, pad), [plain_text, *in_blocks(kept, pad)])

    def _rows(self, rng: Random, stage: Stage, share: float, aside: bool) -> list[list[Piece]]:
        rows, budget = [], stage.step_tokens * share
        while budget > 0:
            row = self.row(rng, aside)
            if size(row) <= stage.row:
                rows.append(row)
                budget -= size(row)
        return rows

    def row(self, rng: Random, aside: bool) -> list[Piece]:
        """One conversation: sums, one to three, or (`aside`) something else that needs no tool."""
        offered = offer(rng)
        messages: Messages = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": rng.choice(SYSTEM)})
        for _ in range(1 if aside else rng.choice((1, 1, 2, 2, 3))):
            if aside:
                messages += spoken([other(rng)])
            elif offered.name:
                asked = problem(rng, evaluation=False)
                messages += answered(offered, asked, *told(rng, asked.result))
            else:
                messages += spoken(turns("arithmetic", rng, 128, evaluation=False))
        if rng.random() < 0.1:
            messages += spoken([other(rng)])
        return self.pieces(messages, offered.tools)

    def pieces(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """A conversation as it is served; only what the assistant says is learned."""
        pieces: list[Piece] = [(list(self.mixture.begin), False)]
        done = 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.template.render(messages[:at], tools=list(tools))
            after = self.template.render(messages[: at + 1], False, tools=list(tools)).removesuffix("\n")
            pieces.append((plain(self.mixture.tokenizer, before[done:]), False))
            pieces.append((plain(self.mixture.tokenizer, after[len(before) :]), True))
            done = len(after)
        return pieces


def other(rng: Random) -> Turn:
    """A question for which no tool is needed."""
    task = rng.choice(OTHER_TASKS)
    return talk(rng) if task == "talk" else turns(task, rng, 64, evaluation=False)[0]


def spoken(conversation: Sequence[Turn]) -> Messages:
    """Questions and answers as messages."""
    messages: Messages = []
    for turn in conversation:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    return messages
