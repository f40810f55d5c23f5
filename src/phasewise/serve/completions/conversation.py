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
from phasewise.serve.tools.formats import GENERIC, TOOL_FORMATS, Format, check
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


@dataclass(frozen=True)
class _Turn:
    """A rendered prompt, and what its answer may hold: calls of `tools` in their `format`, at most one where `single`,
    of `must` at least one; reasoning between `tags`; and a final answer in a form of its own (`answer`). The prompt has
    `opened` the reasoning; it is `closed` by what the prompt ends with where there is none to hold. `special`: {text:
    id} of the special tokens that format and tags are written with."""

    text: str
    tools: Sequence[Mapping[str, Any]]
    must: Sequence[Mapping[str, Any]]
    format: Format | None
    single: bool
    tags: Tags | None
    opened: bool
    closed: bool
    answer: Wanted | None
    special: Mapping[str, int]

    @property
    def spell(self) -> Spelling:
        return Spelling(self.special)

    @property
    def exact(self) -> bool:
        """True if blanks at the beginning belong to the final answer."""
        return self.answer is not None and blanks_may_come_first(self.answer.ask)

    @property
    def reasons(self) -> Tags | None:
        """The tags of reasoning that may still come."""
        done = self.tags is None or self.closed or self.text.rstrip().endswith(self.tags.close)
        return None if done else self.tags


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
        turn = self._turn(ask)
        tags, must = turn.tags, turn.must
        lead, asks = self._grammar(turn, why)
        if tags is not None and ((must and turn.opened) or turn.closed):
            lead = f"\n{tags.close}\n\n{lead}"
        ids = self._llm.tokenizer.encode(turn.text + lead, add_special=False)
        goes_on = bool(ask.continue_final_message or lead or (must and asks) or turn.answer)
        if not turn.tools and tags is None:
            return Prompt(ids, begins=not goes_on)
        alone, ends = bool(must), turn.single and (asks is None or not must)  # a grammar of calls alone ends by itself
        if tags is not None and not must and not turn.closed:
            asks = {**(asks or {}), **_budget(ask, tags, turn.opened, why)} or None
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in turn.tools}
        manner = ParserOptions(turn.format, frozenset(schemas), tags, turn.opened, ends, schemas, turn.exact)
        return Prompt(ids, lead, manner, frozenset(turn.special.values()), asks, alone, begins=not goes_on)

    def _turn(self, ask: ChatAsk) -> _Turn:
        """The rendered prompt, and what its answer may hold. Raises ApiError."""
        tools = [] if ask.tool_choice == "none" else ask.tools or []
        must = forced(tools, ask.tool_choice)
        if tools:
            self._check_tools()
        text, tags, format = self._rendered(ask, tools), self.shown.tags, self.shown.format if tools else None
        opened = tags is not None and text.rstrip().endswith(tags.open)
        closed = opened and ask.silent() and not must
        words = [*(format.tokens if format else ()), *((tags.open, tags.close) if tags else ())]
        ids = {word: self._llm.tokenizer.id(word) for word in words}
        special = {word: i for word, i in ids.items() if i is not None and i in self._llm.tokenizer.special_ids}
        single = ask.parallel_tool_calls is False or isinstance(ask.tool_choice, dict)
        return _Turn(text, tools, must, format, single, tags, opened, closed, ask.structure(), special)

    def _rendered(self, ask: ChatAsk, tools: Sequence[Mapping[str, Any]]) -> str:
        """The prompt. Raises ApiError where the template cannot write it."""
        variables: Mapping[str, Any] = ask.variables()
        if tools and self.shown.format is not GENERIC:
            variables = {**variables, "tools": tools}
        template = self._llm.template if ask.chat_template is None else self._sent(ask.chat_template)
        try:
            return self._written(partial(template.render, **variables), ask.messages, tools)
        except UserError as error:
            param = "messages" if ask.chat_template is None else "chat_template"
            raise ApiError(400, str(error), param) from error

    def _written(
        self, write: Callable[[list[dict[str, Any]]], str], messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:  # fmt: skip
        """The prompt. Raises UserError where the template cannot write it."""
        if self.shown.format is GENERIC:
            return generic.render(write, messages, tools)
        return write(shaped(messages, self.shown.objects))

    def _grammar(self, turn: _Turn, why: Why) -> tuple[str, dict[str, Any] | None]:
        """The beginning of an answer that must be a call, and what is asked of the rest (`Params.ask`) but for the form
        of the final answer. Raises ApiError where that cannot be honoured."""
        lead, asks = self._forced(turn, why) if turn.must else ("", None)
        if turn.answer is not None:
            _check_both(turn.answer, turn.tools, turn.must)
        if not turn.must:
            asks = self._optional(turn)
        reason = None if asks is None else why(asks)
        if reason is not None:
            _refuse(turn.tools, reason, why)
        if turn.answer is not None and not turn.must and (turn.reasons is not None or asks is not None):
            asks = around(turn.reasons, turn.opened, not turn.exact, asks, turn.spell)
        return lead, asks

    def _forced(self, turn: _Turn, why: Why) -> tuple[str, dict[str, Any] | None]:
        """The beginning of an answer that must be a call, or the grammar of the whole: there is one or the other."""
        format, opening = turn.format, self.shown.opening
        assert format is not None, "checked"
        asks = held(
            turn.must,
            lambda tools: grammar(tools, format, opening, turn.spell, turn.single),
            lambda ask: why(ask) is None,
        )
        return (opening.format(name=names(turn.must)[0]), None) if asks is None else ("", asks)

    def _optional(self, turn: _Turn) -> dict[str, Any] | None:
        """The grammar of calls that may come: instead of a final answer in a form of its own, or strict ones."""
        if turn.format is None:
            return None
        if turn.answer is not None and turn.answer.field == OPENAI:
            return calls_beside(turn.tools, turn.format, self.shown.opening, turn.spell, turn.single)
        if strict(turn.tools):
            tags = None if turn.closed else turn.tags
            return optional(turn.tools, turn.format, self.shown.opening, turn.spell, tags, turn.opened)
        return None

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
