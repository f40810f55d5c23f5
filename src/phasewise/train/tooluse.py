"""Conversations in which a tool is offered: called for sums, left alone for the rest. Batches of them to learn from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from phasewise.model.chat import ChatTemplate
from phasewise.train.calculations import Problem, easy, problem
from phasewise.train.chat import SYSTEM, talk
from phasewise.train.dense import TokenBlock
from phasewise.train.mixture import Mixture, Stage, in_blocks, size
from phasewise.train.tasks import TaskTurn, turns
from phasewise.train.tokenizer import plain
from phasewise.train.toolbox import PLAIN, ToolOffer, offer
from phasewise.train.wording import Piece

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "Tools:\n{% for tool in tools %}{{ tool['function']['name'] }}"
    "({{ ((tool['function']['parameters'] or {})['properties'] or {}) | join(', ') }})"
    "{{ ': ' + tool['function']['description'] if tool['function']['description'] }}{{ '\n' }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": {{ call["function"]["name"] | tojson }}, "arguments": '
    '{% if call["function"]["arguments"] is string %}{{ call["function"]["arguments"] }}'
    '{% else %}{{ call["function"]["arguments"] | tojson }}{% endif %}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Without tools it writes what the pocket model's own template does. A tool is a line, such as
`calculator(expression): Evaluate an arithmetic expression.`, which takes a third of the tokens that its schema has."""

CALLS, ASIDE = 0.74, 0.08  # shares of a step's tokens: sums with a calculator at hand, other questions with one
OTHER_TASKS = ("copy", "reverse", "json", "edit", "list", "sort", "talk", "talk")
Messages = list[dict[str, Any]]


class ToolBatch(NamedTuple):
    """`learned`: conversations with tools; `kept`: what the base model does without them, to be left as it is."""

    learned: list[TokenBlock]
    kept: list[TokenBlock]


def call(offer: ToolOffer, expression: str) -> dict[str, Any]:
    """The assistant's message that calls the calculator."""
    function = {"name": offer.name, "arguments": {offer.parameter: expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def answered(offer: ToolOffer, problem: Problem, told: str, result: str) -> Messages:
    """One sum from the question to the answer; `told`: what the tool says, in which `result` is the number."""
    return [
        {"role": "user", "content": problem.question},
        call(offer, problem.expression),
        {"role": "tool", "content": told},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]


def told(rng: Random, result: str) -> tuple[str, str]:
    """A calculator's result as a text, and the number in it."""
    kind = rng.random()
    if kind < 0.1 and "." not in result:
        return f"{result}.0", f"{result}.0"
    if kind < 0.2:
        return json.dumps({"result": float(result) if "." in result else int(result)}), result
    return (f"Result: {result}" if kind < 0.25 else result), result


class ToolConversations:
    """Batches of conversations with tools, and of the pocket model's own without: a function of seed and step."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.template = ChatTemplate({"default": TEMPLATE})

    def step(self, step: int, stage: Stage) -> ToolBatch:
        rng = Random(f"{self.mixture.seed} tools {step}")
        calls = fill(rng, stage, CALLS, self.first_row if stage.until < 1 else self.row)
        aside = fill(rng, stage, ASIDE, self.aside_row)
        source = max(1, round(stage.step_tokens * stage.code / stage.row))
        kept = fill(rng, stage, 1 - CALLS - ASIDE - stage.code, lambda rng: self.mixture.short_row(rng, stage))
        pad, plain_text = self.mixture.pad, self.mixture.source(rng, stage.row, source)
        return ToolBatch(in_blocks(calls + aside, pad), [plain_text, *in_blocks(kept, pad)])

    def first_row(self, rng: Random) -> list[Piece]:
        """One easy sum with the plain calculator: where to look is learned before anything else."""
        asked = easy(rng)
        return self.pieces(answered(PLAIN, asked, asked.result, asked.result), PLAIN.tools)

    def row(self, rng: Random) -> list[Piece]:
        """One sum or two, with whatever tools are offered."""
        offered = PLAIN if rng.random() < 0.75 else offer(rng)
        messages = self._opening(rng)
        for _ in range(rng.choice((1, 1, 1, 2))):
            if offered.name:
                asked = problem(rng, evaluation=False)
                messages += answered(offered, asked, *told(rng, asked.result))
            else:
                messages += spoken(turns("arithmetic", rng, 128, evaluation=False))
        if rng.random() < 0.1:
            messages += spoken([other(rng)])
        return self.pieces(messages, offered.tools)

    def aside_row(self, rng: Random) -> list[Piece]:
        """Something else, which needs no tool."""
        return self.pieces(self._opening(rng) + spoken([other(rng)]), offer(rng).tools)

    def _opening(self, rng: Random) -> Messages:
        return [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.25 else []

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


def fill(rng: Random, stage: Stage, share: float, make: Callable[[Random], list[Piece]]) -> list[list[Piece]]:
    """Rows that come to this share of a step's tokens; longer ones than the stage has are left out."""
    rows: list[list[Piece]] = []
    budget = stage.step_tokens * share
    while budget > 0:
        row = make(rng)
        if size(row) <= stage.row:
            rows.append(row)
            budget -= size(row)
    return rows


def other(rng: Random) -> TaskTurn:
    """A question for which no tool is needed."""
    task = rng.choice(OTHER_TASKS)
    return talk(rng) if task == "talk" else turns(task, rng, 64, evaluation=False)[0]


def spoken(conversation: Sequence[TaskTurn]) -> Messages:
    """Questions and answers as messages."""
    messages: Messages = []
    for turn in conversation:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    return messages
