"""The offline API: `LLM(model, draft="prompt_lookup").generate(prompts)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from phasewise.errors import UserError, near
from phasewise.model.model import Model
from phasewise.model.tokenizer import Detokenizer, Tokenizer
from phasewise.place import Placed
from phasewise.recipe import Builder, Limits, parse
from phasewise.request import Left, Params, Request
from phasewise.trace import Trace

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDED = {"pocket": "target", "pocket-draft": "draft"}  # models that ship with the package


@dataclass(frozen=True)
class Output:
    """What one request gave: `tokens` (an end token included), their `text` up to a stop string, how it left."""

    tokens: list[int]
    text: str
    left: Left
    trace: Trace


def model_path(name: str) -> str:
    """A directory or hub id as given, or the directory of an embedded model."""
    if name not in EMBEDDED:
        return name
    return str(files("phasewise").joinpath("pocket", EMBEDDED[name]))


def dtype_of(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}. {near(name, DTYPES)}")
    return DTYPES[name]


class StopStrings:
    """Watches a request's text and says when one of `stops` has appeared; `text` is what comes before it."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.detokenizer, self.stops = detokenizer, [s for s in stops if s]
        self.text = ""

    def __call__(self, token: int) -> bool:
        start = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += self.detokenizer.push([token])
        found = [at for at in (self.text.find(stop, start) for stop in self.stops) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


class LLM:
    """A model with one method per verb, run in the calling thread.

    `model`: a directory, a hub id, or "pocket". Verbs are given as `draft="prompt_lookup:k=6"`; the others keep their
    defaults. Raises UserError naming whatever does not fit.
    """

    def __init__(
        self,
        model: str = "pocket",
        *,
        dtype: str | None = None,
        device: str = "cpu",
        limits: Limits | None = None,
        **verbs: str | None,
    ) -> None:
        methods = parse(verbs)
        path = model_path(model)
        self.model = Model.load(path, dtype=dtype_of(dtype), device=device)
        self.tokenizer = Tokenizer.load(path)

        def load(name: str) -> Model:
            return Model.load(model_path(name), dtype=self.model.dtype, device=device)

        self.engine: Placed = Builder(self.model, methods, limits or Limits(), load=load).build()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: Params | Sequence[Params] | None = None,
        *,
        stop: Sequence[str] = (),
        progress: Callable[[int], Any] | None = None,
    ) -> list[Output]:
        """One output per prompt (text or token ids), in order. `progress` is told after each finished request."""
        each = list(params) if isinstance(params, Sequence) else [params or Params()] * len(prompts)
        if len(each) != len(prompts):
            raise UserError(f"{len(each)} params for {len(prompts)} prompts: give one, or one for each")
        requests = [self._request(prompt, p, stop) for prompt, p in zip(prompts, each)]
        for request in requests:
            self.engine.add(request)
        left = 0
        while any(request.left is None for request in requests):
            done = sum(request.left is not None for request in self.engine.step())
            left += done
            if progress is not None and done:
                progress(left)
        return [self._output(request) for request in requests]

    def stream(self, prompt: str | Sequence[int], params: Params | None = None) -> Iterator[str]:
        """Text as it comes, never half a character."""
        request = self._request(prompt, params or Params(), ())
        detokenizer, seen = Detokenizer(self.tokenizer), request.known
        self.engine.add(request)
        try:
            while request.left is None:
                self.engine.step()
                new, seen = request.tokens[seen:], request.known
                text = detokenizer.push(new)
                if text:
                    yield text
            if request.left.how == "failed":
                raise UserError(f"the request failed: {request.left.reason}")
            yield detokenizer.flush()
        finally:
            self.engine.cancel(request)

    def _request(self, prompt: str | Sequence[int], params: Params, stop: Sequence[str]) -> Request:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        watch = StopStrings(Detokenizer(self.tokenizer), stop) if stop else None
        return Request(tokens, params, watch=watch)

    def _output(self, request: Request) -> Output:
        assert request.left is not None
        if isinstance(request.watch, StopStrings):
            text = request.watch.text
        else:
            text = self.tokenizer.decode(request.out)
        return Output(request.out, text, request.left, request.trace)
