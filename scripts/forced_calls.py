"""What pocket-tools makes of `tool_choice`: sums with a calculator at hand, over HTTP.

    python scripts/forced_calls.py [--examples 200] [--seed 0] [-- OPTIONS OF phasewise serve]

A server is started, and stopped at the end. The questions are those of the row `calculator` of `phasewise eval`; each
is asked with `tool_choice` auto, required and the calculator's name, greedily. Prints a Markdown table: how many
answers end as calls, have one call of JSON arguments, have an expression of the right value, and say the right number
once they are told what the calculator makes of their expression. `-- --sample standard` shows what is without grammars.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx

from phasewise.bench.quality import proportion
from phasewise.bench.rows.calls import has
from phasewise.bench.server import serving
from phasewise.train.calculations import Problem, calculate, problem, two
from phasewise.train.toolbox import NAME, PARAMETER, PLAIN

CHOICES: dict[str, Any] = {
    "auto": "auto", "required": "required", "named": {"type": "function", "function": {"name": NAME}},
}  # fmt: skip
COLUMNS = ("ends as a call", "one call, of JSON", "right expression", "right answer")


class Asked:
    """Questions to a server with one `tool_choice`."""

    def __init__(self, url: str, choice: Any) -> None:
        self._client = httpx.Client(base_url=url, timeout=120.0)
        self._choice = choice

    def judge(self, asked: Problem) -> tuple[bool, ...]:
        """What holds of COLUMNS for one question."""
        talk: list[dict[str, Any]] = [{"role": "user", "content": asked.question}]
        choice = self._ask(talk, self._choice)
        calls = choice["message"].get("tool_calls") or []
        ended = choice["finish_reason"] == "tool_calls"
        try:
            ((expression,),) = [json.loads(call["function"]["arguments"]).values() for call in calls]
            value = calculate(str(expression))
        except ValueError:
            return ended, len(calls) == 1 and _whole(calls[0]), False, False
        right = value == asked.result
        talk += [choice["message"], {"role": "tool", "tool_call_id": calls[0]["id"], "content": value}]
        said = self._ask(talk, "auto")["message"]["content"] or ""
        return ended, True, right, has(said, asked)

    def _ask(self, talk: Sequence[dict[str, Any]], choice: Any) -> dict[str, Any]:
        body = {"messages": talk, "tools": PLAIN.tools, "tool_choice": choice, "temperature": 0, "max_tokens": 96}
        answer = self._client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()["choices"][0]
        return found


def _whole(call: dict[str, Any]) -> bool:
    """Whether its arguments are an object with the calculator's parameter."""
    try:
        return PARAMETER in json.loads(call["function"]["arguments"])
    except (ValueError, TypeError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="of phasewise serve")
    args = parser.parse_args()
    rng = Random(f"{args.seed} calculator")
    asked = [problem(rng, True, two) for _ in range(args.examples)]
    with serving(["--model", "pocket-tools", *args.options]) as url:
        print(f"| `tool_choice` | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
        for name, choice in CHOICES.items():
            grades = [Asked(url, choice).judge(one) for one in asked]
            shares = [proportion("", sum(column), len(asked)) for column in zip(*grades, strict=True)]
            cells = [f"{row.value:.1%} ({row.low:.1%} to {row.high:.1%})" for row in shares]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
