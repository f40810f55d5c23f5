"""Bodies of requests. Fields that are not supported, or not known, are refused, never ignored (fields.py)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from phasewise.model.sandbox import LONGEST
from phasewise.request.params import SLO, Params
from phasewise.serve.completions.fields import CHAT_REFUSED, COMPLETION_REFUSED, Harmless, check
from phasewise.serve.completions.structured import FIELDS, Wanted, wanted
from phasewise.serve.failures import ApiError
from phasewise.serve.tools import asked

AS_MANY_AS_FIT = 1 << 30  # the engine cuts it to its context and its KV budget
GREEDY_BELOW = 1e-5  # temperatures that float32 logits cannot be divided by
MOST_PATIENT = 1000  # `priority`: nobody goes before others by asking, only after them
COMPLETION_TOKENS = 16  # OpenAI's default for completions
MOST_STOPS = 16
MOST_LOGPROBS = 20  # of the likeliest tokens, beside each token's own

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning, in all three APIs


def _unlimited(value: Any) -> Any:
    """-1 is how llama.cpp's and LM Studio's clients say that an answer has no limit of its own."""
    return AS_MANY_AS_FIT if type(value) is int and value == -1 else value


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Output = Annotated[int, BeforeValidator(_unlimited), Field(ge=1, le=AS_MANY_AS_FIT, description="-1: as many as fit")]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Top = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Budget = Annotated[int, Field(ge=0, le=AS_MANY_AS_FIT)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


Json = dict[str, Any]
_TEXT: Json = {"type": "string", "minLength": 1}  # for the document of fields of several kinds
_NULL: Json = {"type": "null"}
_TOKEN: Json = {"type": "integer", "minimum": 0}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items, "minItems": 1}


class Ask(BaseModel):
    """The fields both endpoints share. Types are strict: a number in quotes is not a number."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    refused: ClassVar[Harmless]

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    stop: Any = Field(
        None, description="a string, or a list of strings", json_schema_extra={"anyOf": [_TEXT, _list(_TEXT), _NULL]}
    )
    seed: Int | None = None
    max_tokens: Output | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    # beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    prompt_logprobs: Top | None = None
    provenance: bool | None = Field(None, description="tell how each token came about (provenance.py)")
    min_tokens: Annotated[int, Field(ge=0, le=AS_MANY_AS_FIT)] | None = None
    allowed_token_ids: Annotated[list[Int], Field(min_length=1)] | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=AS_MANY_AS_FIT)] | None = None
    priority: Annotated[int, Field(ge=0, le=MOST_PATIENT, description="0 goes first, after the key's own")] | None = (
        None
    )
    exact: bool | None = None
    after: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="the id of an earlier answer, to go on from its KV where that is kept (conversation_index.py)"
    )
    timeout: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="seconds within which the whole answer must be there; else it is cancelled, with an error"
    )
    # which texts are wanted (structured.py)
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None
    slo: dict[Literal["ttft_ms", "tpot_ms"], Milliseconds | None] | None = Field(
        None, description="targets: milliseconds to the first token, and per further token on average"
    )

    @field_validator("stop", mode="plain")
    @classmethod
    def _stop(cls, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError("must be a string or a list of strings, none of them empty")
        if len(stops) > MOST_STOPS:
            raise ValueError(f"has {len(stops)} strings; at most {MOST_STOPS} are allowed")
        return stops

    @field_validator("stream_options")
    @classmethod
    def _stream_options(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in ("include_usage", "continuous_usage_stats"):
            if not isinstance((value or {}).get(name, False), bool):
                raise ValueError(f"{name} must be true or false")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        bad = next((key for key in value or {} if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
        if bad is not None:
            raise ValueError(f"has the key {bad!r}, which is not a token id")
        return value

    @model_validator(mode="after")
    def _supported(self) -> Self:
        check(self, self.refused)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs come with whole answers: leave stream out", "prompt_logprobs")
        most = self.limit()
        if most is not None and (self.min_tokens or 0) > most:
            reason = f"min_tokens={self.min_tokens} is more than the {most} tokens that may come"
            raise ApiError(400, reason, "min_tokens", "invalid_value")
        return self

    def asks_for(self, option: str) -> bool:
        """True if this field of `stream_options` is set."""
        return bool((self.stream_options or {}).get(option))

    def limit(self) -> int | None:
        """Output tokens asked for; None = as many as fit."""
        return self.max_tokens

    def stated(self) -> int | None:
        """The same, as far as the client has said so itself."""
        limit = self.limit()
        return None if limit == AS_MANY_AS_FIT else limit

    def samples(self) -> int:
        """The number of samples of each prompt, of which the likeliest `n` are told."""
        return self.n or 1

    def told(self) -> int | None:
        """The number of likeliest tokens that come with each token's log-probability; None: the client wants none."""
        return None

    def scored(self) -> int | None:
        """The same of the prompt's tokens."""
        return self.prompt_logprobs

    def structure(self) -> Wanted | None:
        """Which texts are wanted, if only some are. Raises ApiError."""
        return wanted({name: getattr(self, name) for name in FIELDS})

    def targets(self, default: SLO) -> SLO:
        """The targets asked for, in seconds; the server's own where there are none."""
        asked = {name: ms / 1e3 for name, ms in (self.slo or {}).items() if ms is not None}
        return SLO(asked.get("ttft_ms", default.ttft), asked.get("tpot_ms", default.tpot))

    def params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> Params:
        """The engine's parameters; without a seed, a random one. Of what the request does not say, `defaults` are
        taken, as model/generation.py gives them, and OpenAI's where there are none."""
        structure, limit = self.structure(), self.limit()
        if limit is None:
            limit = max(defaults.get("max_new_tokens", AS_MANY_AS_FIT), self.min_tokens or 0)

        def said(name: str, neutral: float) -> Any:
            own = getattr(self, name)
            return defaults.get(name, neutral) if own is None else own

        temperature = said("temperature", 1.0)
        return Params(
            max_tokens=limit,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_k=max(said("top_k", 0), 0),  # -1 is another way to say all
            top_p=max(said("top_p", 1.0), 1e-9),
            min_p=said("min_p", 0.0),
            repetition_penalty=said("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            seed=random.getrandbits(63) if self.seed is None else self.seed,
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.told(),
            prompt_logprobs=self.scored(),
            provenance=bool(self.provenance),
            min_tokens=self.min_tokens or 0,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority or 0,
            ask=structure and structure.ask,
        )


class CompletionAsk(Ask):
    """POST /v1/completions. `prompt` becomes a list of texts, or of lists of token ids."""

    refused = COMPLETION_REFUSED
    prompt: Any = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists",
        json_schema_extra={"anyOf": [_TEXT, _list(_TEXT), _list(_TOKEN), _list(_list(_TOKEN))]},
    )
    suffix: str | None = Field(None, description="what comes after the text that is filled in (infill.py)")
    echo: bool | None = None
    max_tokens: Annotated[int, BeforeValidator(_unlimited), Field(ge=0, le=AS_MANY_AS_FIT)] | None = None
    logprobs: Top | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    add_special_tokens: bool | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _logprobs(cls, value: Any) -> Any:
        return None if value is False else value  # as chats say it

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.max_tokens == 0 and self.scored() is None:
            fix = "set echo and logprobs, or prompt_logprobs, or at least 1"
            raise ApiError(400, f"max_tokens=0 asks for nothing: {fix}", "max_tokens", "invalid_value")
        for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs"):
            if self.suffix and getattr(self, name):
                raise ApiError(400, f"{name}: the prompt is not what comes before: leave it, or suffix, out", name)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ApiError(400, f"best_of={self.best_of} is less than n={self.n}", "best_of", "invalid_value")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ApiError(400, "best_of chooses among whole answers: leave stream out", "best_of", "invalid_value")
        return self

    def samples(self) -> int:
        return self.best_of or self.n or 1

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: Any) -> list[str] | list[list[int]]:
        return texts_or_ids(value)

    def limit(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def stated(self) -> int | None:
        return None if self.max_tokens == AS_MANY_AS_FIT else self.max_tokens

    def told(self) -> int | None:
        return self.logprobs

    def scored(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((top for top in (echoed, self.prompt_logprobs) if top is not None), default=None)


class ChatAsk(Ask):
    """POST /v1/chat/completions. Messages are checked and become {"role", "content", ...}, as `in_parts` has it."""

    refused = CHAT_REFUSED
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=AS_MANY_AS_FIT)] | None = None
    chat_template: Annotated[str, Field(max_length=LONGEST)] | None = Field(
        None, description="instead of the model's own, where the server allows it"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = Field(None, description="functions that the model may call")
    tool_choice: Any = Field(None, description="none, auto, required, or the function to call")
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = Field(
        None, description="none: no reasoning, where the template can leave it out; others reach the template"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="reaches the template")
    thinking_token_budget: Budget | None = Field(None, description="the most tokens of reasoning, which then ends")
    thinking_budget: Budget | None = Field(None, description="the same, as other clients name it")
    reasoning: dict[str, Any] | None = Field(
        None, description="effort, enabled, and max_tokens, the same as thinking_token_budget"
    )

    @model_validator(mode="after")
    def _top(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
        if self.continue_final_message and self.add_generation_prompt:
            either = "continue_final_message and add_generation_prompt exclude each other: leave one out"
            raise ApiError(400, either, "continue_final_message", "invalid_value")
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        """What `thinking_budget` and `reasoning` say becomes `thinking_token_budget` and `reasoning_effort`."""
        said = {"thinking_token_budget": self.thinking_token_budget, "thinking_budget": self.thinking_budget}
        if self.reasoning is not None:
            said["reasoning"] = reasoning_budget(self.reasoning)
            self.reasoning_effort = self.reasoning.get("effort") or self.reasoning_effort
        given = {name: value for name, value in said.items() if value is not None}
        if len(set(given.values())) > 1:
            raise ApiError(400, f"{' and '.join(given)} give different budgets: leave one out", [*given][-1],
                           "invalid_value")  # fmt: skip
        self.thinking_token_budget = next(iter(given.values()), None)
        return self

    def variables(self) -> dict[str, Any]:
        """For the chat template."""
        hints = {
            "reasoning_effort": self.reasoning_effort,
            "verbosity": self.verbosity,
            "thinking_budget": self.thinking_token_budget,
            "enable_thinking": False if self.silent() else None,
        }
        own = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        return {
            **{name: value for name, value in hints.items() if value is not None},
            **(self.chat_template_kwargs or {}),
            **{name: value for name, value in own.items() if value is not None},
        }

    def silent(self) -> bool:
        """True if the answer is to come without reasoning."""
        return self.reasoning_effort == "none" or self.thinking_token_budget == 0

    def budget(self) -> int | None:
        """The most tokens of reasoning; None: as many as the model likes, or the answer may have no more anyhow."""
        budget, limit = 0 if self.silent() else self.thinking_token_budget, self.limit()
        return None if budget is None or (limit is not None and limit <= budget) else budget

    @field_validator("messages")
    @classmethod
    def _messages(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_message(message, i) for i, message in enumerate(value)]

    @field_validator("tools", mode="plain")
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]] | None:
        return None if value is None else asked.tools(value)

    @field_validator("tool_choice", mode="plain")
    @classmethod
    def _tool_choice(cls, value: Any) -> str | dict[str, Any] | None:
        return None if value is None else asked.choice(value)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = {"messages", "add_generation_prompt", "continue_final_message", "template", "tools", "self"} & set(
            value or {}
        )
        if taken:
            raise ValueError(f"must not have {', '.join(sorted(taken))}")
        return value

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def told(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def reasoning_budget(reasoning: Mapping[str, Any]) -> int | None:
    """The most tokens of reasoning that a field `reasoning` asks for; None: it says nothing of that. Raises ApiError
    for what it may not have, and for an effort that is none."""
    known = ("effort", "max_tokens", "enabled", "summary", "generate_summary")
    other = next((name for name, value in reasoning.items() if name not in known and value is not None), None)
    if other is not None:  # reasoning is told whole, which leaves nothing to sum up
        raise ApiError(400, f"reasoning: {other} is not supported here; leave it out", "reasoning",
                       "unsupported_parameter")  # fmt: skip
    effort, budget, enabled = (reasoning.get(name) for name in ("effort", "max_tokens", "enabled"))
    wrong = _wrong_reasoning(effort, budget, enabled)
    if wrong is not None:
        raise ApiError(400, f"reasoning: {wrong}", "reasoning", "invalid_value")
    return 0 if enabled is False else budget


def _wrong_reasoning(effort: Any, budget: Any, enabled: Any) -> str | None:
    """What is wrong with these values of a field `reasoning`; None if nothing is."""
    if effort is not None and effort not in get_args(Effort):
        return f"effort must be one of {', '.join(get_args(Effort))}"
    if budget is not None and not (type(budget) is int and 0 <= budget <= AS_MANY_AS_FIT):
        return f"max_tokens must be a whole number of 0 to {AS_MANY_AS_FIT}"
    if not isinstance(enabled, bool | None) or (enabled is False and budget):
        return "enabled must be true or false, and not false beside max_tokens"
    return None


A = TypeVar("A", bound=BaseModel)


def read(kind: type[A], body: bytes) -> A:
    """The body as a request of this kind. Raises ApiError 400 naming the field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is not JSON ({message.removeprefix('Invalid JSON: ')})", code="invalid_json")
    if not first["loc"]:
        raise ApiError(400, "the body must be a JSON object")
    param, where = str(first["loc"][0]), ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        raise ApiError(400, f"{where} is required", param, "missing_required_parameter")
    raise ApiError(400, f"{where}: {message}", param, "invalid_value")


def _message(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    """One message with its content as text, or as several parts; `developer` is what newer clients call `system`."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {i} needs a role, such as system, user or assistant")
    if isinstance(content, list):
        content = _from_parts(content, i)
    elif not isinstance(content, str) and not (content is None and role == "assistant"):
        raise ValueError(f"message {i}: content must be a string or a list of text parts")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ValueError(f"message {i}: role tool needs the tool_call_id that it answers")
    given = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in given:
        given["tool_calls"] = asked.calls(given["tool_calls"], i)
        given = given if given["tool_calls"] else {key: given[key] for key in given if key != "tool_calls"}
    return {**given, "role": "system" if role == "developer" else role, "content": content or ""}


def _from_parts(parts: Sequence[Any], i: int) -> str | list[dict[str, Any]]:
    """The content of message `i`, which came in parts. Raises ValueError for one that is not text."""
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
        raise ValueError(f'message {i}: the only content parts supported are {{"type": "text", "text": "..."}}')
    return in_parts([part["text"] for part in parts])


def in_parts(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """A message's content: the text, where it is one, else its parts, which the chat template puts together."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def texts_or_ids(value: Any) -> list[str] | list[list[int]]:
    """Turns a text, several texts, token ids or several lists of ids into a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return value
        if _ids(value):
            return [value]
        if all(isinstance(each, list) and each and _ids(each) for each in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists; not empty")


def _ids(values: Iterable[Any]) -> bool:
    return all(type(each) is int and 0 <= each < 1 << 31 for each in values)
