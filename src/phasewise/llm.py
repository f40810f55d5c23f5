"""The offline API: `LLM(model, draft="prompt_lookup").generate(prompts)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from phasewise.builder import build
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.engine.limits import Limits
from phasewise.errors import PhasewiseError, UserError
from phasewise.load import model_path
from phasewise.model.chat import ChatTemplate
from phasewise.model.tokenizer import Tokenizer
from phasewise.request.params import SLO, Params
from phasewise.request.request import Left, Request
from phasewise.request.text import Text
from phasewise.request.trace import Trace
from phasewise.verbs.place import Placed

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Stop = str | Sequence[str]


@dataclass(frozen=True)
class Output:
    """What one request gave: `tokens` (an end token included), their `text` up to a stop string, how it left."""

    tokens: list[int]
    text: str
    left: Left
    trace: Trace


class LLM:
    """A model with one method per verb, run in the calling thread.

    `model`: a directory, a hub id, or "pocket". Verbs are given as `draft="prompt_lookup:k=6"`; the others keep their
    defaults. `recipes` are other choices, by name, that single requests may ask for: {"fast": {"draft":
    "prompt_lookup:k=6"}}; verbs that a recipe does not name are as given here. Raises UserError naming whatever does
    not fit.

        llm = LLM("pocket", draft="prompt_lookup", evict="snapkv:keep=0.5")
        for output in llm.generate(["def add(", "import os"], Params(max_tokens=32)):
            print(output.text, output.left.reason, output.trace.ttft)
        print(llm.chat([{"role": "user", "content": "What is 17 + 25?"}]).text)
        for piece in llm.stream("Once upon", stop=["."]):
            print(piece, end="", flush=True)
    """

    def __init__(
        self,
        model: str = "pocket",
        *,
        dtype: str | None = None,
        device: str = "cpu",
        limits: Limits | None = None,
        recipes: Mapping[str, Mapping[str, str | None]] | None = None,
        **verbs: str | None,
    ) -> None:
        self.name = model
        self.limits = limits or Limits()
        texts = {name: dict(own) for name, own in (recipes or {}).items()}
        builder = build(EngineSpec(model, self.limits, dtype, device, verbs, texts))
        self.model = builder.model
        self.tokenizer = Tokenizer.load(model_path(model))
        self.recipes = tuple(builder.recipes)  # what requests may ask for, besides the default ""
        self.engine: Placed = builder.build()

    @cached_property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat templates; only chatting needs them."""
        return ChatTemplate.load(model_path(self.name))

    # ---- what a user calls
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        stop: Stop = (),
        progress: Callable[[int], Any] | None = None,
        recipe: str | Sequence[str] = "",
    ) -> list[Output]:
        """One output per prompt (text or token ids), in order; all of them run together.

        `params` and `recipe`: for all, or one for each. `stop`: a string that ends the text, or several. `progress` is
        told how many requests have left, whenever it is more. Look at `Output.left`: a request that failed does not
        raise.
        """
        each = _several(prompts)
        settings = list(params) if isinstance(params, Sequence) else [params or Params()] * len(each)
        recipes = [recipe] * len(each) if isinstance(recipe, str) else list(recipe)
        for given, what in ((settings, "params"), (recipes, "recipes")):
            if len(given) != len(each):
                raise UserError(f"{len(given)} {what} for {len(each)} prompts: give one, or one for each")
        requests = [
            self.request(self.encode(prompt), p, stop, recipe=name) for prompt, p, name in zip(each, settings, recipes)
        ]
        try:
            for request in requests:
                self.engine.add(request)
            self._run(requests, progress)
        finally:  # also when interrupted, or when a later prompt was refused
            for request in requests:
                self.engine.cancel(request)
        return [self._output(request, stop) for request in requests]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: Params | None = None, *, stop: Stop = (), recipe: str = ""
    ) -> Iterator[str]:
        """Text as it comes, never half a character; `prompt` may be a conversation. Leaving the loop early cancels.

        Raises PhasewiseError if the request fails on the way.
        """
        return self._pieces(self.request(self._ids(prompt), params or Params(), stop, recipe=recipe), stop)

    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        stop: Stop = (),
        recipe: str = "",
        **extra: Any,
    ) -> Output:
        """The assistant's answer to a conversation of {"role", "content"} messages.

        `extra` are variables for the chat template. Raises UserError if the model has none.
        """
        return self.generate([self.encode_chat(messages, **extra)], params, stop=stop, recipe=recipe)[0]

    def close(self) -> None:
        """Dismiss workers in other processes, if there are any."""
        self.engine.close()

    # ---- what the server needs as well
    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[Message], **extra: Any) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins."""
        return self.tokenizer.encode(self.template.render(messages, **extra), add_special=False)

    def request(
        self, ids: Sequence[int], params: Params, stop: Stop = (), slo: SLO | None = None, recipe: str = ""
    ) -> Request:
        """A request that ends at a stop string as well."""
        watch = self.text(params, stop).watch if stop else None
        return Request(ids, params, slo=slo, watch=watch, recipe=recipe)

    def text(self, params: Params, stop: Stop = ()) -> Text:
        """A writer of the text of one output drawn with `params`."""
        eos = () if params.ignore_eos else self.model.config.eos
        return Text(self.tokenizer, stop, {*eos, *params.stop_tokens})

    # ---- inside
    def _ids(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(prompt)  # type: ignore[arg-type]
        return self.encode(prompt)  # type: ignore[arg-type]

    @torch.inference_mode()  # once, instead of in every step
    def _run(self, requests: Sequence[Request], progress: Callable[[int], Any] | None) -> None:
        told = 0
        while any(request.left is None for request in requests):
            some_left = any(request.left is not None for request in self.engine.step())
            if progress is not None and some_left:
                left = sum(request.left is not None for request in requests)
                if left > told:
                    progress(left)
                told = left

    def _pieces(self, request: Request, stop: Stop) -> Iterator[str]:
        text, seen = self.text(request.params, stop), request.known
        self.engine.add(request)
        try:
            over = False
            while not over:
                if request.left is None and request.known == seen:
                    self.engine.step()
                over = request.left is not None  # others may step the engine too: look before reading the tokens
                new, seen = request.tokens[seen:], request.known
                piece = text.push(new) + (text.flush() if over else "")
                if piece:
                    yield piece
            assert request.left is not None
            if request.left.how == "failed":
                raise PhasewiseError(f"the request failed: {request.left.reason}")
        finally:
            self.engine.cancel(request)

    def _output(self, request: Request, stop: Stop) -> Output:
        assert request.left is not None
        text = self.text(request.params, stop)
        return Output(request.out, text.push(request.out) + text.flush(), request.left, request.trace)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt counts as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
