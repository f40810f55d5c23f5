"""A fake OpenAI-compatible server whose words follow from the prompt by a hash, with one flaw on request."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

WORDS = [f" {first}{last}" for first in "bdfgklmnprst" for last in ("an", "el", "ir", "os", "um")]
FLAWS = (
    "alone", "batch", "prefix", "shorter", "stream", "chat", "drafts", "unseeded", "one draw", "mates draw", "choices",
    "one choice", "unlikely", "positive", "stop shown", "stop unnamed", "echo", "offsets", "miscounted", "sum",
    "stream usage", "no usage", "garbage", "crash",
)  # fmt: skip


class Fake:
    """`flaw`: what is wrong with it; `without`: fields that it refuses with 400; `recipes`: beside the model itself."""

    def __init__(self, flaw: str = "", without: Collection[str] = (), recipes: Collection[str] = ("fast",)) -> None:
        assert not flaw or flaw in FLAWS
        self.flaw, self.without, self.recipes = flaw, without, recipes
        self.live, self.seen, self.calls = 0, set[str](), itertools.count()
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self.models)
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])

    async def models(self) -> Any:
        return {"data": [{"id": name} for name in ("m", *(f"m@{each}" for each in self.recipes))]}

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        refused = next((name for name in self.without if name in body), None)
        if refused is not None:
            return JSONResponse({"error": {"message": f"no {refused} here"}}, 400)
        self.live += 1
        await asyncio.sleep(0)
        crowd, known = self.live > 1, body["prompt"] in self.seen
        await asyncio.sleep(0)
        self.live -= 1
        self.seen.add(body["prompt"])
        if self.flaw == "crash" and body.get("n"):
            return JSONResponse({"error": "oh"}, 500)
        if self.flaw == "garbage" and body.get("echo"):
            return JSONResponse({"choice": []})
        n = 1 if self.flaw == "one choice" else body.get("n", 1)
        choices = [self.choice(body, index, crowd, known) for index in range(n)]
        if body.get("stream"):
            return StreamingResponse(self.events(body, choices), media_type="text/event-stream")
        return {"choices": choices, "usage": self.usage(body, choices)}

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        if "messages" in self.without:
            return JSONResponse({"error": {"message": "no chats here"}}, 404)
        words = self.words({**body, "prompt": body["messages"][0]["content"]}, 0, False, False)
        if not body.get("stream"):
            return {"choices": [{"index": 0, "message": {"content": "".join(words)}, "finish_reason": "length"}]}
        pieces = words[: -1 if self.flaw == "chat" else None]
        events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        return StreamingResponse(self.lines([*events, last]), media_type="text/event-stream")

    # ---- what is said
    def words(self, body: dict[str, Any], index: int, crowd: bool, known: bool) -> list[str]:
        """The tokens of one choice, flawed in the third."""
        drawn = ""
        if body.get("temperature"):
            drawn = f"{body.get('seed')} {index}"
            drawn = {"unseeded": f"{next(self.calls)}", "one draw": ""}.get(self.flaw, drawn)
        count = body["max_tokens"]
        said = [_word(f"{body['prompt']} {drawn} {i}") for i in range(count)]
        odd = {
            "alone": known and next(self.calls) % 2, "batch": crowd, "prefix": known, "shorter": count < 20,
            "drafts": "@" in body["model"], "mates draw": crowd and bool(drawn), "choices": index == 1,
        }  # fmt: skip
        if odd.get(self.flaw) and count > 2:
            said[2] = " odd"
        return said

    def choice(self, body: dict[str, Any], index: int, crowd: bool, known: bool) -> dict[str, Any]:
        said, finish = self.words(body, index, crowd, known), "length"
        text = "".join(said)
        for stop in body.get("stop", ()):
            if stop in text:
                shown = len(stop) if self.flaw == "stop shown" and body.get("stream") else 0
                text, finish = text[: text.index(stop) + shown], "length" if self.flaw == "stop unnamed" else "stop"
        lead = body["prompt"] if body.get("echo") else ""
        told = {
            "index": index,
            "text": (lead if self.flaw != "echo" else lead.strip(".")[1:]) + text,
            "finish_reason": finish,
        }
        return {**told, "logprobs": self.scores(body, said, lead)} if body.get("logprobs") else told

    def scores(self, body: dict[str, Any], said: list[str], lead: str) -> dict[str, Any]:
        tokens = [*([lead] if lead else []), *said]
        starts = list(itertools.accumulate(map(len, tokens), initial=1 if self.flaw == "offsets" else 0))[:-1]
        logprobs = [0.5 if self.flaw == "positive" else -0.25] * len(tokens)
        tops = [
            {token: own, " other": -0.1 if self.flaw == "unlikely" else -3.0} for token, own in zip(tokens, logprobs)
        ]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": starts}

    def usage(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, int]:
        if self.flaw == "no usage":
            return {}
        prompt, count = len(body["prompt"].split()), len(choices) * body["max_tokens"]
        count += self.flaw == "miscounted" or (self.flaw == "stream usage" and bool(body.get("stream")))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count + (self.flaw == "sum"),
        }

    def events(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> AsyncIterator[str]:
        found: list[Any] = []
        for choice in choices:
            text = choice["text"]
            half = len(text) // 2
            found.append({"choices": [{**choice, "text": text[:half], "finish_reason": None}]})
            rest = "" if self.flaw == "stream" else text[half:]
            found.append({"choices": [{**choice, "text": rest, "logprobs": None}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            found.append({"choices": [], "usage": self.usage(body, choices)})
        return self.lines(found)

    @staticmethod
    async def lines(events: list[Any]) -> AsyncIterator[str]:
        for event in events:
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"


def _word(text: str) -> str:
    return WORDS[int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % len(WORDS)]
