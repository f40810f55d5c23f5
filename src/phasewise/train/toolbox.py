"""The tools that are offered in training: a calculator under many names, and others that are of no use for sums."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

Tool = dict[str, Any]

NAME, PARAMETER = "calculator", "expression"
NAMES = ("calc", "calculate", "compute", "evaluate", "math", "do_math", "solve", "run_calculator", "Calculator")
PARAMETERS = ("expr", "formula", "input", "text", "query", "term")
RENAMED = (("number_cruncher", "calculation"), ("maths_tool", "sum"), ("eval_expression", "code"))  # never trained on
ABOUT = (
    "Evaluate an arithmetic expression.", "Evaluates an arithmetic expression and returns the result.",
    "A calculator.", "Calculate the value of an expression.", "Computes sums, differences, products and quotients.",
    "Compute the result of an expression such as 2 + 2.", "Do arithmetic with numbers.", "Calculator",
)  # fmt: skip
MEANS = ("The expression to evaluate.", "An arithmetic expression, such as 2 * (3 + 4).", "What to calculate")
OTHERS = (
    ("weather", "The weather in a city.", "city"), ("get_weather", "Get the current weather.", "location"),
    ("search", "Search the web.", "query"), ("time", "The time of day at a place.", "place"),
    ("translate", "Translate a text into English.", "text"), ("send_mail", "Send a mail.", "message"),
    ("look_up", "Look up a word in the dictionary.", "word"), ("read_file", "Read a file.", "path"),
)  # fmt: skip


@dataclass(frozen=True)
class ToolOffer:
    """Tools as a request has them; `name` and `parameter` of the calculator among them, empty if there is none."""

    tools: tuple[Tool, ...]
    name: str = ""
    parameter: str = ""


def tool(name: str, about: str, parameter: str, means: str = "") -> Tool:
    """A function of one string."""
    described = {"type": "string", "description": means} if means else {"type": "string"}
    parameters = {"type": "object", "properties": {parameter: described}, "required": [parameter]}
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


PLAIN = ToolOffer((tool(NAME, ABOUT[0], PARAMETER),), NAME, PARAMETER)
"""The calculator as documentation and tests offer it."""


def offer(rng: Random) -> ToolOffer:
    """Most often the calculator alone; now and then under another name, with other tools, or only those."""
    name, parameter = NAME, PARAMETER
    if rng.random() < 0.3:
        name, parameter = rng.choice(NAMES), rng.choice((*PARAMETERS, PARAMETER))
    made = tool(name, rng.choice(ABOUT), parameter, rng.choice(MEANS) if rng.random() < 0.3 else "")
    _vary(rng, made["function"])
    kind = rng.random()
    if kind > 0.2:
        return ToolOffer((made,), name, parameter)
    other = tool(*rng.choice(OTHERS))
    if kind < 0.04:
        return ToolOffer((other,))
    return ToolOffer((made, other) if rng.random() < 0.5 else (other, made), name, parameter)


def _vary(rng: Random, function: Tool) -> None:
    """Schemas as programs write them: with more keys, fewer, or in another order."""
    parameters = function["parameters"]
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    if rng.random() < 0.15:
        del parameters["required"]
    if rng.random() < 0.1:
        function["strict"] = True
    if rng.random() < 0.1:
        parameters["type"] = parameters.pop("type")  # last
    if rng.random() < 0.1:
        del function["description"]


def renamed(rng: Random) -> ToolOffer:
    """A calculator under a name and with a parameter that no training example has."""
    name, parameter = rng.choice(RENAMED)
    return ToolOffer((tool(name, rng.choice(ABOUT), parameter),), name, parameter)
