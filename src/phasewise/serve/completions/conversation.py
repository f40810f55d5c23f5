"""From a conversation to a prompt, and to how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.methods.sample.budget_forcing import ASK
from phasewise.model.chat import ClientTemplate
from phasewise.serve.completions.schema import ChatAsk
from phasewise.serve.completions.structured import OPENAI, Wanted
from phasewise.serve.failures import ApiError
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.tools import generic
from phasewise.serve.tools.asked import forced, names, shaped, strict
from phasewise.serve.tools.calls import of_object
from phasewise.serve.tools.final import around, blanks_may_come_first
from phasewise.serve.tools.final import calls as calls_beside
from phasewise.serve.tools.forced import grammar, held
from phasewise.serve.tools.formats import GENERIC, TOOL_FORMATS, check
from phasewise.serve.tools.optional import grammar as optional
from phasewise.serve.tools.reader import ParserOptions
from phasewise.serve.tools.reasoning import Tags
from phasewise.serve.tools.spelling import Spelling
from phasewise.serve.tools.template import TemplateTools, look

Why = Callable[[dict[str, Any]], str | None]


@dataclass(frozen=True)
class Prompt:
    """`lead` ends the prompt and begins the answer; `manner` is None where the answer is plain text; special tokens
    that are `shown` have text; `ask` is the grammar (`Params.ask`) of what follows the lead, if there is one, or what
    stands around the one that the request asks for. `alone`: nothing of what the request asks for holds besides.
    The answer `begins` a text, or goes on with the prompt's."""

    ids: list[int]
    lead: str = ""
    manner: ParserOptions | None = None
    shown: frozenset[int] = frozenset()
    ask: dict[str, Any] | None = None
    alone: bool = False
    begins: bool = True


class ChatRenderer:
    """Knows what this model's chat template shows, once it has been asked. Raises UserError for unknown formats."""

    def __init__(self, llm: LLM, policy: ServePolicy) -> None:
        check(policy.tool_format, policy.reasoning_format)
        if policy.tool_format == GENERIC.name and llm.template.takes_tools:
            raise UserError("--tool-format generic is for models whose chat template shows no tools, and this model's "
                            "own does: leave it out, or name the format that it writes")  # fmt: skip
        self._llm, self._policy = llm, policy

    @cached_property
    def shown(self) -> TemplateTools:
        return look(self._llm.template, self._policy.tool_format, self._policy.reasoning_format)

    def prompt(self, ask: ChatAsk, why: Why) -> Prompt:
        """`why`: why what is asked (`Params.ask`) cannot be honoured, or None. Raises ApiError naming the field that
        this model cannot have."""
        tools = [] if ask.tool_choice == "none" else ask.tools or []
        must = forced(tools, ask.tool_choice)
        variables: Mapping[str, Any] = ask.variables()
        if tools:
            self._check_tools()
            variables = variables if self.shown.format is GENERIC else {**variables, "tools": tools}
        template = self._llm.template if ask.chat_template is None else self._sent(ask.chat_template)
        try:
            text = self._written(partial(template.render, **variables), ask.messages, tools)
        except UserError as error:
            param = "messages" if ask.chat_template is None else "chat_template"
            raise ApiError(400, str(error), param) from error
        tags = self.shown.tags
        opened = tags is not None and text.rstrip().endswith(tags.open)
        closed = opened and ask.silent() and not must  # by what the prompt ends with: there is no reasoning to hold
        format = self.shown.format if tools else None
        words = [*(format.tokens if format else ()), *((tags.open, tags.close) if tags else ())]
        special = self._llm.tokenizer.special_ids
        ids_of = {word: i for word in words if (i := self._llm.tokenizer.id(word)) in special and i is not None}
        single, spell = ask.parallel_tool_calls is False or isinstance(ask.tool_choice, dict), Spelling(ids_of)
        lead, asks = self._forced(must, single, spell, why)
        answer = ask.structure()
        if answer is not None:
            _check_both(answer, tools, must)
        if format is not None and not must and answer is not None and answer.field == OPENAI:
            asks = calls_beside(tools, format, self.shown.opening, spell, single)
        elif strict(tools) and format is not None and not must:
            asks = optional(tools, format, self.shown.opening, spell, None if closed else tags, opened)
        reason = None if asks is None else why(asks)
        if reason is not None:
            _refuse(tools, reason, why)
        exact = answer is not None and blanks_may_come_first(answer.ask)
        if answer is not None and not must:
            reasons = tags if tags is not None and not closed and not text.rstrip().endswith(tags.close) else None
            if reasons is not None or asks is not None:
                asks = around(reasons, opened, not exact, asks, spell)
        if tags is not None and ((must and opened) or closed):
            lead = f"\n{tags.close}\n\n{lead}"
        ids = self._llm.tokenizer.encode(text + lead, add_special=False)
        goes_on = bool(ask.continue_final_message or lead or (must and asks) or ask.structure())
        if not tools and tags is None:
            return Prompt(ids, begins=not goes_on)
        alone, ends = bool(must), single and (asks is None or not must)  # a grammar of calls alone ends by itself
        if tags is not None and not must and not closed:
            asks = {**(asks or {}), **_budget(ask, tags, opened, why)} or None
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        manner = ParserOptions(format, frozenset(schemas), tags, opened, ends, schemas, exact)
        return Prompt(ids, lead, manner, frozenset(ids_of.values()), asks, alone, begins=not goes_on)

    def _written(
        self, write: Callable[[list[dict[str, Any]]], str], messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:  # fmt: skip
        """The prompt. Raises UserError where the template cannot write it."""
        if self.shown.format is GENERIC:
            return generic.render(write, messages, tools)
        return write(shaped(messages, self.shown.objects))

    def _forced(
        self, must: Sequence[Mapping[str, Any]], single: bool, spell: Spelling, why: Why
    ) -> tuple[str, dict[str, Any] | None]:
        """The beginning of an answer that must be a call, or the grammar of the whole: there is one or the other."""
        if not must:
            return "", None
        format, opening = self.shown.format, self.shown.opening
        assert format is not None, "checked"
        asks = held(must, lambda tools: grammar(tools, format, opening, spell, single), lambda ask: why(ask) is None)
        return (opening.format(name=names(must)[0]), None) if asks is None else ("", asks)

    def _sent(self, text: str) -> ClientTemplate:
        """The template that a request brings; its answer is read as the model's own says."""
        if not self._policy.allow_templates:
            raise ApiError(400, "chat_template: this server takes none from requests (--allow-templates would): leave "
                           "it out, or set what the model's own has in chat_template_kwargs", "chat_template",
                           "unsupported_parameter")  # fmt: skip
        return ClientTemplate(text, self._llm.template.tokens)

    def _check_tools(self) -> None:
        if not self._llm.template.names:
            return  # rendering says so
        if not self.shown.takes_tools:
            raise ApiError(400, "this model's chat template shows no tools to the model: leave tools out, serve a "
                           "model that was trained to use them, or serve it with --tool-format generic", "tools",
                           "unsupported_parameter")  # fmt: skip
        if self._policy.tool_format == "none":
            raise ApiError(400, "tools are turned off on this server (--tool-format none)", "tools",
                           "unsupported_parameter")  # fmt: skip
        if self.shown.format is None:
            raise ApiError(400, "this model's chat template writes tool calls in a format that is not known here: "
                           f"leave tools out, or serve it with --tool-format ({', '.join(TOOL_FORMATS[3:])})",
                           "tools", "unsupported_parameter")  # fmt: skip


def _budget(ask: ChatAsk, tags: Tags, opened: bool, why: Why) -> dict[str, Any]:
    """What is asked (`Params.ask`) for reasoning to end with its budget. Raises ApiError where nothing ends it and a
    budget was named."""
    budget = ask.budget()
    if budget is None:
        return {}
    asked = {ASK: {"open": tags.open, "close": tags.close, "opened": opened, "tokens": budget}}
    reason = why(asked)
    if reason is None:
        return asked
    if not budget:
        return {}  # as far as the template can leave reasoning out
    raise ApiError(400, f"a thinking budget of {budget} tokens cannot be held: {reason}", "thinking_token_budget",
                   "unsupported_parameter")  # fmt: skip


def _check_both(answer: Wanted, tools: Sequence[Mapping[str, Any]], must: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError where a grammar holds the whole answer, and another one its calls. OpenAI's `response_format` is
    for the final answer alone, which may come instead of calls."""
    if answer.field != OPENAI and (must or strict(tools)):
        both = f"tool_choice and strict tools are held by a grammar, and so is the whole answer by {answer.field}: "
        raise ApiError(400, both + "leave one out", "tool_choice", "invalid_value")


def _refuse(tools: Sequence[Mapping[str, Any]], reason: str, why: Why) -> NoReturn:
    """A grammar of calls cannot be honoured: of which tool, if it is a schema, and why."""
    wanted = strict(tools)
    for tool in tools:
        function = tool["function"]
        found = why({"json_schema": of_object(function)}) if function["name"] in wanted else None
        if found is not None:
            raise ApiError(400, f"tools: {function['name']}: {found}", "tools", "invalid_value")
    param = "tools" if wanted else "tool_choice"
    raise ApiError(400, f"{param}: {reason}", param, "invalid_value")
