"""The sandbox of chat templates, which come with downloaded checkpoints or with requests: none may reach out, run for
ever or grow.

A template has no loop but `for`, and no call but of macros: each turn of either is counted, and looks at the clock.
The operators of an expression are bounded as well, where they make more than they were given.

For templates that clients send that is not enough: filters, methods and formats of strings (`"%9999999999d" % 1`) make
as much as they like. They are rendered in a child process, whose memory and time are limited (`confine`), and what it
returns is limited too.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Sized
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # that a rendering may take
MOST_TURNS = 1_000_000  # of loops and macros, in one rendering
MOST_ITEMS = 1 << 25  # characters or items that an operator may make
TURN = "_phasewise_turn"  # what a template calls in each turn

# of a template that a client sent
LONGEST = 1 << 16  # characters of the template
PROCESSOR_SECONDS = 10  # for the process, its start included; the sandbox allows fewer
WAIT = 30.0  # seconds by the clock, as the process makes way for others
MEMORY = 512 << 20  # bytes of address space
MOST_TEXT = 8 << 20  # characters of a prompt
MOST_REASON = 400  # characters of what is told of an error


class RenderBudget:
    """Counts the turns of one rendering. Raises TemplateError when there are too many, or its time is over."""

    def __init__(self) -> None:
        self._left, self._end = MOST_TURNS, time.monotonic() + SECONDS

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TemplateError(f"it takes more than {MOST_TURNS:,} turns of its loops")
        if time.monotonic() > self._end:
            raise TemplateError(f"it takes longer than {SECONDS:g} s")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, bounded."""

    intercepted_binops = frozenset(["*", "**", "+"])

    def counted(self, text: str) -> Template:
        """The template, which has to be rendered with `RenderBudget` as its variable TURN."""
        tree = self.parse(text)
        looping: Iterable[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for node in looping:
            turn = nodes.Call(nodes.Name(TURN, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        tree.set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises TemplateError for an operator that would make too much."""
        sizes = [len(each) for each in (left, right) if isinstance(each, Sized)]
        numbers = [abs(each) for each in (left, right) if isinstance(each, int)]
        if operator == "**":
            too_much = any(number > 1024 for number in numbers)
        elif operator == "*" and sizes and numbers:
            too_much = sizes[0] * numbers[0] > MOST_ITEMS
        else:
            too_much = sum(sizes) > MOST_ITEMS or any(number.bit_length() > 1 << 16 for number in numbers)
        if too_much:
            raise TemplateError(f"{operator} would make more than a template may")
        return super().call_binop(context, operator, left, right)


def confine() -> None:
    """Limits the processor time and the memory of this process, for good."""
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
