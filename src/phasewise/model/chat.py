"""Chat templates: messages to a prompt, through a sandbox, because templates come with downloaded checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from phasewise.child import Channel, Child, Message
from phasewise.errors import UserError, near
from phasewise.model.sandbox import (
    MEMORY,
    MOST_REASON,
    MOST_TEXT,
    PROCESSOR_SECONDS,
    TURN,
    WAIT,
    RenderBudget,
    Sandbox,
    confine,
)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    """Plain JSON: jinja2's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


_MARK = "the-final-message-goes-on-here "  # ends in a space, which templates that trim take away
_PARTS = ("first-part-of-a-probe", "second-part-of-a-probe")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of what a message's author thought


class ChatTemplate:
    """A checkpoint's templates by name, with its special tokens as variables. Errors in them are UserErrors."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str] | None = None) -> None:
        self.tokens = dict(tokens or {})
        self.sources = dict(sources)
        self._takes_parts: dict[tuple[str, str], bool] = {}  # by template and role
        environment = _environment()
        self._templates = {}
        self._variables = {}
        for name, text in sources.items():
            try:
                self._variables[name] = meta.find_undeclared_variables(environment.parse(text))
                self._templates[name] = environment.counted(text)
            except TemplateSyntaxError as error:
                raise UserError(f"The chat template {name!r} does not parse (line {error.lineno}: {error.message}). "
                                "Fix it in chat_template.jinja or tokenizer_config.json.") from error  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> ChatTemplate:
        """Loads the templates of a model by its path or hub id; one without templates loads, and says so when
        rendered."""
        from phasewise.model.source import (
            source,
        )  # torch comes with it, which a process that only renders has no need of

        files = source(path)
        return cls(files.templates(), files.special())

    @property
    def names(self) -> tuple[str, ...]:
        """The templates there are; none, and there is nothing to chat through."""
        return tuple(self._templates)

    @property
    def takes_tools(self) -> bool:
        """True if the template that is taken when `tools` are given shows them to the model."""
        name = "tool_use" if "tool_use" in self._templates else "default"
        return "tools" in self._variables.get(name, ())

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *,
               template: str | None = None, continue_final_message: bool = False, **extra: Any) -> str:  # fmt: skip
        """The prompt for a conversation; `add_generation_prompt` ends it where the assistant's answer begins, and
        `continue_final_message`, instead, where the last message's text ends, for the answer to go on with it.

        `template` picks one by name; None takes `tool_use` when `tools` are given and it exists, else `default`.
        `extra` are variables for the template, such as `tools` or `enable_thinking`; `tools` and `documents` are None
        where they are not given. Fields of messages that are None are left out. A content that is a list of parts goes
        to a template that writes such lists, and to any other as the texts with a space between them.
        """
        if continue_final_message:
            return self._open(messages, template, extra)
        name = self._pick(template, bool(extra.get("tools")))
        shown = [self._plain(message, name) for message in messages]
        return self._render(name, shown, {**extra, "add_generation_prompt": add_generation_prompt})

    def _render(self, name: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text that one template makes."""
        own = {"tools": None, "documents": None, **self.tokens, **variables, "messages": messages, TURN: RenderBudget()}
        try:
            return self._templates[name].render(own)
        except Exception as error:  # a template can fail in any way that an expression can; none is our traceback
            reason = str(error) or type(error).__name__
            raise UserError(f"The chat template cannot render these messages: {reason}. Check roles and content, or "
                            "send a plain prompt instead.") from error  # fmt: skip

    def _plain(self, message: Mapping[str, Any], name: str) -> dict[str, Any]:
        """A message as this template gets it."""
        shown = {key: value for key, value in message.items() if value is not None}
        thought = next((shown[key] for key in _REASONING if key in shown), None)
        if thought is not None:
            shown = {"thinking": thought, **shown, "reasoning_content": thought}
        content = shown.get("content")
        if isinstance(content, (bytes, bytearray)):
            raise UserError(f"content {content!r:.40} of a message is bytes, not text: decode it first")
        if isinstance(content, (list, tuple)) and not self._shows_parts(name, str(shown.get("role"))):
            shown["content"] = joined(content)
        return shown

    def _shows_parts(self, name: str, role: str) -> bool:
        """True if this template writes a content of several parts as their texts, in a message of this role."""
        if (name, role) not in self._takes_parts:
            probe = {"role": role, "content": [{"type": "text", "text": text} for text in _PARTS]}
            before = [] if role in ("user", "system") else [{"role": "user", "content": "a"}]
            after = [{"role": "user", "content": "a"}] if role == "system" else []
            try:
                text = self._render(name, [*before, probe, *after], {"add_generation_prompt": False})
            except UserError:
                text = ""
            bare = not any(quote + _PARTS[0] in text for quote in "'\"")  # no list as Python or JSON writes it
            self._takes_parts[name, role] = bare and all(part in text for part in _PARTS)
        return self._takes_parts[name, role]

    def _open(self, messages: Sequence[Mapping[str, Any]], template: str | None, extra: Mapping[str, Any]) -> str:
        """The prompt up to where the last message's text ends."""
        last = messages[-1] if messages else {}
        content = last.get("content")
        if isinstance(content, list) and content and isinstance(content[-1], dict):
            ending: Any = [*content[:-1], {**content[-1], "text": f"{content[-1].get('text')}{_MARK}"}]
        elif isinstance(content, str):
            ending = content + _MARK
        else:
            raise UserError("continue_final_message continues the last message, but that has no text: give it some")
        marked = [*messages[:-1], {**last, "content": ending}]
        text = self.render(marked, False, template=template, **extra)
        at = text.rfind(_MARK.strip())
        if at < 0:
            raise UserError("The chat template does not render the last message's text, so it cannot be continued.")
        trims = not text.startswith(_MARK, at)  # then it would have trimmed the text's own end
        return text[:at].rstrip() if trims else text[:at]

    def _pick(self, name: str | None, tools: bool) -> str:
        if not self._templates:
            raise UserError("This model has no chat template. Send a plain prompt, or put a chat_template.jinja "
                            "beside its tokenizer.json.")  # fmt: skip
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise UserError(f"There is no chat template {name!r}. {near(name, self._templates)}")
        return name


def joined(parts: Sequence[Any]) -> str:
    """The texts of a content's parts with a space between two of them. UserError for a part that is no text."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError('The only parts that this chat template shows are {"type": "text", "text": "..."}.')
    return " ".join(map(str, texts))


@dataclass(frozen=True)
class ClientTemplate:
    """A chat template that a client sent. It renders as ChatTemplate does, with the same special tokens as variables,
    in a child process of its own."""

    text: str
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt. Raises UserError."""
        asked = {"text": self.text, "tokens": dict(self.tokens), "messages": messages, "variables": variables}
        end, child = time.monotonic() + WAIT, None
        try:
            child = Child("phasewise.model.chat:render", asked, nice=10, quiet=True, patience=WAIT)
            said = child.channel.receive(max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise UserError(f"The chat template takes longer than {WAIT:g} s.") from None
        except (EOFError, OSError):  # killed by a limit
            raise UserError(f"The chat template takes more than {PROCESSOR_SECONDS} s or {MEMORY >> 20} MB.") from None
        finally:
            if child is not None:
                child.kill()
        if "error" in said:
            raise UserError(said["error"])
        return str(said["text"])


def render(channel: Channel, text: str, tokens: Mapping[str, str], messages: list[Message], variables: Message) -> None:
    """Renders in this process, whose limits are set first, and sends the prompt or the error."""
    confine()
    try:
        prompt = ChatTemplate({"default": text}, tokens).render(messages, **variables)
        if len(prompt) > MOST_TEXT:
            raise UserError(f"The chat template makes a prompt of {len(prompt):,} characters: at most {MOST_TEXT:,}.")
        said = {"text": prompt}
    except (UserError, MemoryError, RecursionError) as error:
        said = {"error": (str(error) or f"The chat template fails: {type(error).__name__}.")[:MOST_REASON]}
    channel.send(said)
