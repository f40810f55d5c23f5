"""A client of OpenAI's API that keeps what laws compare: texts, tokens, log-probabilities, offsets and usage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from phasewise.errors import PhasewiseError, UserError

REFUSALS = (400, 404, 405, 415, 422, 501)  # what is asked for is not offered
BUSY = (429, 503)


class Refused(PhasewiseError):
    """The server does not offer what was asked for."""


class Busy(PhasewiseError):
    """The server takes no more requests now."""


class Malformed(PhasewiseError):
    """The server failed, or its answer is none of OpenAI's API."""


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One answer. `tokens`, and what is beside them, are None where the server gives no log-probabilities."""

    text: str
    finish: str | None = None
    tokens: tuple[str, ...] | None = None
    logprobs: tuple[float | None, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()  # of each token, the likeliest ones
    offsets: tuple[int, ...] = ()

    def then(self, more: ReplyChoice) -> ReplyChoice:
        """This, and what comes after it in a stream."""
        tokens = None if self.tokens is None and more.tokens is None else (*(self.tokens or ()), *(more.tokens or ()))
        return ReplyChoice(
            self.text + more.text, more.finish or self.finish, tokens, self.logprobs + more.logprobs,
            self.tops + more.tops, self.offsets + more.offsets,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    """All choices of a request, by index, and its usage, if it was told."""

    choices: tuple[ReplyChoice, ...]
    usage: Mapping[str, int] = field(default_factory=dict)

    @property
    def only(self) -> ReplyChoice:
        if len(self.choices) != 1:
            raise Malformed(f"one answer was asked for, and {len(self.choices)} came")
        return self.choices[0]


class Client:
    """Completions and chats of one model. Raises Refused, Busy or Malformed.

    `scored`: ask for log-probabilities, so that answers are compared token by token.
    """

    def __init__(self, http: httpx.AsyncClient, model: str, scored: bool = False) -> None:
        self._http, self.model, self.scored = http, model, scored

    def named(self, model: str) -> Client:
        """The same for another model's name."""
        return Client(self._http, model, self.scored)

    async def complete(self, prompt: str, tokens: int, **fields: Any) -> Reply:
        """What goes on with a prompt: greedily, unless `fields` say otherwise."""
        return self._answer([await self._post("completions", self._body(tokens, fields, prompt=prompt))])

    async def stream(self, prompt: str, tokens: int, **fields: Any) -> Reply:
        """The same, put together from the events of a stream."""
        body = self._body(tokens, {**fields, "stream": True}, prompt=prompt)
        return self._answer([event async for event in self._events("completions", body)])

    async def chat(self, content: str, tokens: int, stream: bool) -> Reply:
        """The answer to one message, streamed or not."""
        said = {"model": self.model, "temperature": 0, "max_tokens": tokens}
        body = {**said, "messages": [{"role": "user", "content": content}]}
        if not stream:
            return self._answer([await self._post("chat/completions", body)])
        return self._answer([event async for event in self._events("chat/completions", {**body, "stream": True})])

    def _body(self, tokens: int, fields: Mapping[str, Any], **own: Any) -> dict[str, Any]:
        scored = {"logprobs": 1} if self.scored else {}
        return {"model": self.model, "max_tokens": tokens, "temperature": 0, **scored, **own, **fields}

    # ---- HTTP
    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            response = await self._http.post(f"/v1/{path}", json=body)
        except httpx.HTTPError as error:
            raise Malformed(f"no answer: {type(error).__name__} {error}") from error
        _check(response)
        return _json(response.text)

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        try:
            async with self._http.stream("POST", f"/v1/{path}", json=body) as response:
                if response.is_error:
                    await response.aread()
                _check(response)
                async for line in response.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield _json(line[5:])
        except httpx.HTTPError as error:
            raise Malformed(f"the stream broke: {type(error).__name__} {error}") from error

    @staticmethod
    def _answer(events: Sequence[Any]) -> Reply:
        """One answer of one body, or of the events of a stream."""
        choices, usage = dict[int, ReplyChoice](), dict[str, int]()
        try:
            for event in events:
                if "error" in event:
                    raise Malformed(f"an error came in the stream: {event['error']}")
                usage.update({name: n for name, n in (event.get("usage") or {}).items() if isinstance(n, int)})
                for said in event["choices"]:
                    index = said.get("index", 0)
                    choices[index] = choices.get(index, ReplyChoice("")).then(_choice(said))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Malformed(f"an answer that cannot be read ({type(error).__name__}: {error})") from error
        return Reply(tuple(choices[index] for index in sorted(choices)), usage)


async def models(http: httpx.AsyncClient) -> list[str]:
    """The names that a server lists. Raises UserError where it cannot be reached, or lists none."""
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        found = [str(card["id"]) for card in response.json()["data"]]
    except httpx.HTTPError as error:
        raise UserError(f"{http.base_url} does not list its models: {error}: give the address of a server that speaks "
                        "OpenAI's API, without /v1, and --key where it needs one") from error  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{http.base_url}/v1/models is no list as OpenAI's API has it: is it such a server?") from error
    if not found:
        raise UserError(f"{http.base_url} lists no model: say which one with --model")
    return found


def _check(response: httpx.Response) -> None:
    if response.status_code in REFUSALS:
        raise Refused(f"HTTP {response.status_code}: {response.text[:200]}")
    if response.status_code in BUSY:
        raise Busy(f"HTTP {response.status_code}: the server is busy; try again when nobody else uses it")
    if response.is_error:
        raise Malformed(f"HTTP {response.status_code}: {response.text[:200]}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Malformed(f"an answer that is not JSON: {text[:80]!r}") from error


def _choice(said: Mapping[str, Any]) -> ReplyChoice:
    """A choice of a completion, of a chat, or of an event of either's stream."""
    message = said.get("message") or said.get("delta") or {}
    plain = ReplyChoice(said.get("text") or message.get("content") or "", said.get("finish_reason"))
    scores = said.get("logprobs")
    if not scores:
        return plain
    if "content" in scores:
        return _scored_by_token(plain, scores["content"] or [])
    return replace(
        plain,
        tokens=tuple(scores["tokens"]),
        logprobs=tuple(scores["token_logprobs"]),
        tops=tuple(each or {} for each in scores.get("top_logprobs") or ()),
        offsets=tuple(scores.get("text_offset") or ()),
    )


def _scored_by_token(plain: ReplyChoice, entries: Sequence[Mapping[str, Any]]) -> ReplyChoice:
    """The choice with an entry per token, as a chat has them, and llama.cpp's completions, too."""
    return replace(
        plain,
        tokens=tuple(entry["token"] for entry in entries),
        logprobs=tuple(entry["logprob"] for entry in entries),
        tops=tuple({each["token"]: each["logprob"] for each in entry.get("top_logprobs") or ()} for entry in entries),
    )
