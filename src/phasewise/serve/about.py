"""Small endpoints that never reach the engine: the server describes itself and turns text into tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Self

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasewise.errors import UserError
from phasewise.serve.completions.schema import ChatAsk, Int, read
from phasewise.serve.failures import ApiError, json_response
from phasewise.version import __version__

if TYPE_CHECKING:
    from phasewise.serve.service import Service


# what only a conversation has
CHAT = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools", "tool_choice",
)  # fmt: skip


class StrictBody(BaseModel):
    """A body of few fields: one that is unknown is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None


class TokenizeAsk(StrictBody):
    """POST /tokenize: the tokens of a prompt, or of a conversation as the chat template writes it."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
        wrong = next((name for name in CHAT if getattr(self, name) is not None), None)
        if self.prompt is not None and wrong is not None:
            raise ApiError(400, f"{wrong} is for messages: leave it out beside prompt", wrong, "invalid_value")
        return self

    def chat(self) -> ChatAsk:
        """The conversation, checked as that of a chat is."""
        fields = {name: value for name in CHAT if (value := getattr(self, name)) is not None}
        return read(ChatAsk, json.dumps({"model": self.model, "messages": self.messages, **fields}).encode())


class DetokenizeAsk(StrictBody):
    """POST /detokenize"""

    tokens: list[Int]


class About:
    """GET /version, /tokenizer_info, /health/live and /health/ready, POST /tokenize and /detokenize."""

    def __init__(self, service: Service) -> None:
        self._service, self._llm = service, service.llm
        self.gets: list[tuple[str, Callable[[], Awaitable[Response]]]] = [
            ("/version", self.version),
            ("/tokenizer_info", self.tokenizer_info),
            ("/health/live", self.live),
            ("/health/ready", service.health),
        ]
        self.posts: list[tuple[str, Callable[[Request], Awaitable[Response]], type[BaseModel]]] = [
            ("/tokenize", self.tokenize, TokenizeAsk),
            ("/detokenize", self.detokenize, DetokenizeAsk),
        ]

    async def version(self) -> Response:
        """GET /version: the version of phasewise."""
        return json_response({"version": __version__})

    async def tokenizer_info(self) -> Response:
        """The special tokens by their names, and the chat template: what clients need that spell prompts themselves."""
        template = self._llm.template
        return json_response({**template.tokens, "chat_template": template.sources.get("default")})

    async def live(self) -> Response:
        """503 once the engine has failed: only a restart helps then. 200 while it runs, and while it shuts down."""
        failed = self._service.engine.failed
        if failed is not None:
            return json_response({"status": "failed", "reason": failed}, 503)
        return json_response({"status": "ok"})

    async def tokenize(self, request: Request) -> Response:
        """A prompt's token ids, as the same prompt would be read by the other endpoints."""
        ask = await self._service.read(TokenizeAsk, request)
        recipe = self._service.recipe(ask.model)
        try:
            ids = await self._encode(ask)
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from error
        known = self._llm.tokenizer.token
        return json_response({
            "count": len(ids), "max_model_len": self._llm.engine.reach(recipe), "tokens": ids,
            "token_strs": [known(i) for i in ids] if ask.return_token_strs else None,
        })  # fmt: skip

    async def _encode(self, ask: TokenizeAsk) -> list[int]:
        tokenizer = self._llm.tokenizer
        if ask.prompt is not None:
            return await asyncio.to_thread(tokenizer.encode, ask.prompt, ask.add_special_tokens is not False)
        prompt = await self._service.prompt(ask.chat())
        return [*(tokenizer.begin if ask.add_special_tokens else ()), *prompt.ids]

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        ask = await self._service.read(DetokenizeAsk, request)
        self._service.recipe(ask.model)
        vocab = self._llm.model.config.vocab
        bad = next((token for token in ask.tokens if not 0 <= token < vocab), None)
        if bad is not None:
            reason = f"tokens: token id {bad} is outside the vocabulary of {vocab}"
            raise ApiError(400, reason, "tokens", "invalid_value")
        text = await asyncio.to_thread(self._llm.tokenizer.decode, ask.tokens, False)
        return json_response({"prompt": text})
