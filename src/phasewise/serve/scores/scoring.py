"""Scores how likely one text follows another: POST /v1/score and /v1/rerank.

A generative model is asked for nothing but its log-probabilities; nothing is generated. What comes before is computed
once for all texts that follow it: the first of them leaves its prefix in the cache, where the others find it.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self

from fastapi import Request as HTTPRequest
from fastapi.responses import Response
from pydantic import BaseModel, Field, model_validator
from starlette.types import Receive

from phasewise.kv.prefix import BLOCK
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.serve.about import StrictBody
from phasewise.serve.completions.answer import finish_reason
from phasewise.serve.completions.schema import AS_MANY_AS_FIT
from phasewise.serve.failures import ApiError, json_response
from phasewise.serve.loop import OutputStream
from phasewise.serve.notifier import Notifier

if TYPE_CHECKING:
    from phasewise.serve.service import Service

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]


class ScoreAsk(StrictBody):
    """POST /v1/score: of one text and several that may follow it, or of as many pairs."""

    text_1: Text | Texts
    text_2: Text | Texts

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if isinstance(self.text_1, list) and len(self.text_1) not in (1, len(self._after)):
            reason = f"{len(self.text_1)} of text_1 for {len(self._after)} of text_2: give one, or as many"
            raise ApiError(400, reason, "text_1", "invalid_value")
        return self

    @property
    def _after(self) -> list[str]:
        return self.text_2 if isinstance(self.text_2, list) else [self.text_2]

    def pairs(self) -> list[tuple[str, str]]:
        """Every text with what comes before it."""
        before = self.text_1 if isinstance(self.text_1, list) else [self.text_1]
        return list(zip(before * len(self._after) if len(before) == 1 else before, self._after))


class RerankAsk(StrictBody):
    """POST /v1/rerank: which documents is the query likely to follow?"""

    query: Text
    documents: Texts
    top_n: Annotated[int, Field(ge=1, le=AS_MANY_AS_FIT)] | None = None


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probabilities of a text's tokens, given those before them."""

    logprob: float  # the sum
    tokens: int

    @property
    def mean(self) -> float:
        return self.logprob / self.tokens


class ScoringEndpoint:
    """The two endpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._llm = service, service.llm
        self.posts: list[tuple[str, Callable[[HTTPRequest], Awaitable[Response]], type[BaseModel]]] = [
            ("/v1/score", self.score, ScoreAsk),
            ("/v1/rerank", self.rerank, RerankAsk),
        ]

    async def score(self, request: HTTPRequest) -> Response:
        """The mean log-probability of each text's tokens."""
        ask = await self._service.read(ScoreAsk, request)
        found, total = await self._likelihoods(request, ask.model, ask.pairs(), "text_2")
        data = [
            {"index": i, "object": "score", "score": one.mean, "logprob": one.logprob, "tokens": one.tokens}
            for i, one in enumerate(found)
        ]
        usage = {"prompt_tokens": total, "total_tokens": total}
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return json_response({**head, "model": ask.model or self._service.name, "data": data, "usage": usage})

    async def rerank(self, request: HTTPRequest) -> Response:
        """Documents by how likely the query is after them: the geometric mean of its tokens' probabilities."""
        ask = await self._service.read(RerankAsk, request)
        pairs = [(document + "\n\n", ask.query) for document in ask.documents]
        found, total = await self._likelihoods(request, ask.model, pairs, "query")
        order = sorted(range(len(found)), key=lambda i: -found[i].mean)[: ask.top_n]
        results = [
            {"index": i, "document": {"text": ask.documents[i]}, "relevance_score": math.exp(found[i].mean)}
            for i in order
        ]
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": ask.model or self._service.name}
        return json_response({**head, "usage": {"total_tokens": total}, "results": results})

    # ---- inside
    async def _likelihoods(
        self, request: HTTPRequest, model: str | None, pairs: Sequence[tuple[str, str]], param: str
    ) -> tuple[list[Likelihood], int]:
        """The likelihood of every pair's second text, and the number of tokens of all."""
        recipe = self._service.recipe(model)
        spelled = await asyncio.to_thread(self._spelled, pairs, param)
        requests = [self._request(before, after, recipe) for before, after in spelled]
        total = sum(request.known for request in requests)
        feeds = [OutputStream(each, Notifier()) for each in requests]
        await ScoringRun(self._service, request.receive).run(self._waves(feeds, [before for before, _ in spelled]))
        found = []
        for feed, (before, after) in zip(feeds, spelled):
            places = range(len(before), len(before) + len(after))
            found.append(Likelihood(sum(feed.scores[at].logprob for at in places), len(after)))
        return found, total

    def _spelled(self, pairs: Sequence[tuple[str, str]], param: str) -> list[tuple[list[int], list[int]]]:
        """The tokens of both texts of each pair, each spelled by itself."""
        encode = self._llm.tokenizer.encode
        before = {text: encode(text) for text, _ in pairs}
        after = {text: encode(text, False) for _, text in pairs}
        if not all(before.values()) or not all(after.values()):
            raise ApiError(400, f"{param}: a text has no tokens, so nothing can be said of it", param, "invalid_value")
        return [(before[one], after[other]) for one, other in pairs]

    def _request(self, before: list[int], after: list[int], recipe: str) -> Request:
        params = Params(max_tokens=0, prompt_logprobs=0, scored_from=len(before))
        return self._llm.request([*before, *after], params, slo=self._service.slo, recipe=recipe)

    def _waves(self, feeds: Sequence[OutputStream], before: Sequence[list[int]]) -> list[list[OutputStream]]:
        """First one text after every prefix that can be shared, then all others; never more at once than may run."""
        first: list[OutputStream] = []
        others: list[OutputStream] = []
        seen = set[tuple[int, ...]]()
        for feed, prefix in zip(feeds, before):
            known = tuple(prefix)
            (others if len(prefix) > BLOCK and known in seen else first).append(feed)
            seen.add(known)
        most = self._llm.limits.max_running
        return [wave[at : at + most] for wave in (first, others) for at in range(0, len(wave), most)]


class ScoringRun:
    """Runs requests wave by wave; they are cancelled when their client leaves."""

    def __init__(self, service: Service, receive: Receive) -> None:
        self._engine, self._metrics, self._receive = service.engine, service.metrics, receive
        self._gone = False
        self._feeds: list[OutputStream] = []

    async def run(self, waves: Sequence[list[OutputStream]]) -> None:
        """Raises ApiError if one fails."""
        watcher = asyncio.create_task(self._watch())
        try:
            for wave in waves:
                if self._gone:
                    raise ApiError(499, "the client left before its answer was complete")
                await self._engine.add(wave)
                self._feeds = wave
                self._metrics.took(wave[0].request.recipe, len(wave), sum(feed.posted for feed in wave))
                for feed in wave:
                    while feed.left is None and not self._gone:
                        await feed.bell.wait()
                    if feed.left is not None:
                        finish_reason(feed.left)
        finally:
            watcher.cancel()
            self._engine.cancel([feed for feed in self._feeds if feed.left is None])

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        for feed in self._feeds:
            feed.bell.ring()
