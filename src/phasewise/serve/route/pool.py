"""The servers behind the router: which of them a request goes to, which have answered lately, and whose answers are
whose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from phasewise.cluster.prefix_routing import PrefixRouting
from phasewise.serve.route.upstream import Upstream, text_of

log = logging.getLogger(__name__)
REMEMBERED = 65_536  # ids of answers
ID = re.compile(rb'"id"\s*:\s*"([\w.:-]{1,128})"')
FILES = re.compile(rb'"(?:output|error)_file_id"\s*:\s*"([\w.:-]{1,128})"')  # what a batch has made
KEPT = ("/v1/responses/", "/v1/files/", "/v1/batches/")  # before the id of what one server keeps
NAMES = ("previous_response_id", "after", "input_file_id")  # fields with such an id
TOKENIZED = {"/v1/chat/completions", "/v1/completions"}  # whose prompts /tokenize reads as they are
TOKENIZE_FIELDS = ("model", "prompt", "messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs",
                   "add_generation_prompt", "continue_final_message", "add_special_tokens")  # fmt: skip
SECONDS_TO_TOKENIZE = 5.0


class ServerPool:
    """`tokens`: prompts are compared as tokens, which one of the servers is asked for; else as they are sent."""

    def __init__(self, urls: Sequence[str], policy: PrefixRouting, tokens: bool = False) -> None:
        self.upstreams = [Upstream(number, url.rstrip("/")) for number, url in enumerate(urls)]
        self.policy, self.tokens = policy, tokens
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None)
        )
        self._owners: OrderedDict[str, Upstream] = OrderedDict()

    # ---- choosing
    def ranked(self, prompt: Sequence[int], owner: Upstream | None = None) -> list[Upstream]:
        """The servers to try, the best first: whoever has the answer that the request goes on from, then by the policy
        those that are up, then the others, which may have come back."""
        there = [each for each in self.upstreams if each.up and each is not owner]
        gone = [each for each in self.upstreams if not each.up and each is not owner]
        return [*([owner] if owner is not None else []), *self.policy.ranked(prompt, there), *gone]

    async def prompt(self, path: str, body: Mapping[str, Any], headers: Sequence[tuple[bytes, bytes]]) -> Sequence[int]:
        """A request's prompt, for the policy to compare."""
        text = text_of(body)
        if not self.tokens or not isinstance(text, bytes) or path not in TOKENIZED:
            return text
        asked = {name: body[name] for name in TOKENIZE_FIELDS if name in body}
        for upstream in (each for each in self.upstreams if each.up):
            try:
                answer = await self.http.post(
                    f"{upstream.url}/tokenize", json=asked, headers=list(headers), timeout=SECONDS_TO_TOKENIZE
                )
                found = answer.json()["tokens"]
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                continue
            return [int(token) for token in found]
        return ()

    # ---- answers that others go on from
    def owner(self, path: str, body: Mapping[str, Any]) -> Upstream | None:
        """The server that has the answer, the file or the batch which a request names, in its path or in a field."""
        named = [path.split("/")[3]] if path.startswith(KEPT) else [body.get(name) for name in NAMES]
        found = (self._owners.get(name) for name in named if isinstance(name, str))
        return next((upstream for upstream in found if upstream is not None), None)

    def note(self, upstream: Upstream, beginning: bytes) -> None:
        """An answer begins like this: later requests may name its id, and the files that it names."""
        found = ID.search(beginning)
        for name in [*([found[1]] if found else []), *FILES.findall(beginning)]:
            self._owners[name.decode()] = upstream
        while len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    # ---- health
    @contextlib.asynccontextmanager
    async def watched(self, seconds: float) -> AsyncIterator[None]:
        """Ask every server now, and then every so many seconds, whether it is there."""
        await self.check(seconds)
        task = asyncio.create_task(self._watch(seconds))
        try:
            yield
        finally:
            task.cancel()
            await self.http.aclose()

    async def _watch(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self.check(seconds)

    async def check(self, seconds: float) -> None:
        await asyncio.gather(*(self._check(upstream, seconds) for upstream in self.upstreams))

    async def _check(self, upstream: Upstream, seconds: float) -> None:
        try:
            up = (await self.http.get(f"{upstream.url}/health", timeout=max(1.0, seconds))).status_code == 200
        except httpx.HTTPError:
            up = False
        if upstream.up and not up:
            upstream.lost()
            log.warning("server %d (%s) does not answer", upstream.number, upstream.url)
        upstream.up = up

    # ---- numbers
    async def metrics(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The router's own numbers, then the sums of all servers' counters, in Prometheus' text format."""
        names = ("up", "requests", "failures", "sizes", "hits", "prefilling", "decoding")
        lines = [f'phasewise_route_{name}{{server="{each.number}"}} {int(getattr(each, name))}'
                 for name in names for each in self.upstreams]  # fmt: skip
        sums: dict[str, float] = {}
        for upstream in self.upstreams:
            try:
                answer = await self.http.get(f"{upstream.url}/metrics", headers=list(headers), timeout=5.0)
            except httpx.HTTPError:
                continue
            for sample, value in samples(answer.text if answer.status_code == 200 else ""):
                sums[sample] = sums.get(sample, 0.0) + value
        return "\n".join([*lines, *(f"{sample} {value:g}" for sample, value in sums.items())]) + "\n"


def samples(text: str) -> list[tuple[str, float]]:
    """The counters in a text of metrics, those that end in _total, _sum, _count or _bucket."""
    found = []
    for line in text.splitlines():
        sample, _, value = line.rpartition(" ")
        if not line.startswith("#") and re.fullmatch(r"\w+_(total|sum|count|bucket)(\{.*\})?", sample):
            with contextlib.suppress(ValueError):
                found.append((sample, float(value)))
    return found


def parsed(body: bytes) -> Mapping[str, Any]:
    """A request's JSON object; empty where it is none, for the server to say so."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
