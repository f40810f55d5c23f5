"""The offline API: `LLM(model, draft="prompt_lookup").generate(prompts, max_tokens=64)`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from phasewise.builder import build
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.engine.limits import Limits
from phasewise.errors import PhasewiseError, UserError, near
from phasewise.load import model_path
from phasewise.model.chat import ChatTemplate
from phasewise.model.tokenizer import Tokenizer
from phasewise.options import lossy
from phasewise.request.params import SLO, Params
from phasewise.request.request import Left, Request
from phasewise.request.text import Text
from phasewise.request.trace import Trace
from phasewise.verbs.place import Placed

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Stop = str | Sequence[str]
FIELDS = tuple(field.name for field in fields(Params) if field.init)


@dataclass(frozen=True)
class Output:
    """What one request gave: `tokens` (an end token included), their `text` up to a stop string, how it left."""

    tokens: list[int]
    text: str
    left: Left
    trace: Trace


class LLM:
    """A model with one method per verb, run in the calling thread.

    `model`: a name that `phasewise models` lists, a directory, a `.gguf` file or a hub id. Verbs are given as
    `draft="prompt_lookup:k=6"`; the others keep their defaults. `recipes` are other choices, by name, that single
    requests may ask for: {"fast": {"draft": "prompt_lookup:k=6"}}; verbs that a recipe does not name are as given here.
    Raises UserError naming whatever does not fit.

        llm = LLM("pocket", draft="prompt_lookup", evict="snapkv:keep=0.5")
        for output in llm.generate(["def add(", "import os"], max_tokens=32):
            print(output.text, output.left.reason, output.trace.ttft)
        print(llm.chat([{"role": "user", "content": "What is 17 + 25?"}], temperature=0.7).text)
        for piece in llm.stream("Once upon", stop=["."], max_tokens=20):
            print(piece, end="", flush=True)

    Every call takes the fields of `Params` as keywords, instead of `params` or beside it: they override its fields, for
    all prompts. Raises UserError for a keyword that nobody knows and for a value that `Params` refuses.
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
        self.lossy = {name: lossy(own) for name, own in {"": builder.methods, **builder.recipes}.items()}
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
        **own: Any,
    ) -> list[Output]:
        """One output per prompt (text or token ids), in order; all of them run together. A single prompt counts as a
        list of one.

        `params` and `recipe`: for all, or one for each; `own`: fields of `Params`, for all. `stop`: a string that ends
        the text, or several. `progress` is told how many requests have left, whenever it is more. Look at
        `Output.left`: a request that failed does not raise.
        """
        each = _several(prompts)
        _refuse_unknown(own, "params", "stop", "progress", "recipe")
        if isinstance(params, Sequence):
            settings = [_settled(one, own) for one in params]
        else:
            settings = [_settled(params, own)] * len(each)
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
        self,
        prompt: Prompt | Sequence[Message],
        params: Params | None = None,
        *,
        stop: Stop = (),
        recipe: str = "",
        variables: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Iterator[str]:
        """Text as it comes, never half a character. Leaving the loop early cancels.

        `prompt` may be a conversation; then `variables` are as in `chat`. `own`: fields of `Params`. Raises
        PhasewiseError if the request fails on the way.
        """
        _refuse_unknown(own, "params", "stop", "recipe", "variables")
        settings, ids = _settled(params, own), self._ids(prompt, variables)
        return self._pieces(self.request(ids, settings, stop, recipe=recipe), stop)

    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        stop: Stop = (),
        recipe: str = "",
        variables: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Output:
        """The assistant's answer to a conversation of {"role", "content"} messages.

        `variables` are for the chat template: {"enable_thinking": False}, {"tools": [...]}. `own`: fields of `Params`.
        Raises UserError if the model has no template.
        """
        _refuse_unknown(own, "params", "stop", "recipe", "variables")
        ids = self.encode_chat(messages, variables)
        return self.generate([ids], params, stop=stop, recipe=recipe, **own)[0]

    def close(self) -> None:
        """Dismiss workers in other processes, if there are any."""
        self.engine.close()

    # ---- what the server needs as well
    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins.

        `variables` are for the chat template; `template` among them picks one by name. Raises UserError for `messages`
        among them.
        """
        variables = variables or {}
        taken = sorted({"messages", "self"} & variables.keys())
        if taken:
            raise UserError(f"variables must not have {' and '.join(taken)}: the chat template is given the messages")
        return self.tokenizer.encode(self.template.render(messages, **variables), add_special=False)

    def request(
        self, ids: Sequence[int], params: Params, stop: Stop = (), slo: SLO | None = None, recipe: str = "",
        shown: Collection[int] = (),
    ) -> Request:  # fmt: skip
        """A request that ends at a stop string as well."""
        watch = self.text(params, stop, shown).watch if stop else None
        return Request(ids, params, slo=slo, watch=watch, recipe=recipe)

    def text(self, params: Params, stop: Stop = (), shown: Collection[int] = ()) -> Text:
        """A writer of the text of one output drawn with `params`; `shown` are special tokens that have text."""
        eos = () if params.ignore_eos else self.model.config.eos
        return Text(self.tokenizer, stop, {*eos, *params.stop_tokens}, shown)

    # ---- inside
    def _ids(self, prompt: Prompt | Sequence[Message], variables: Mapping[str, Any] | None) -> list[int]:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(prompt, variables)  # type: ignore[arg-type]
        if variables:
            raise UserError(f"variables={variables!r} are for a chat template: give a list of messages with them")
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


def _refuse_unknown(own: Mapping[str, Any], *named: str) -> None:
    """Raise UserError for a keyword that is neither a field of `Params` nor one that the call has `named`."""
    for name in own:
        if name not in FIELDS:
            chat = " What is for the chat template goes into variables={...}." if "variables" in named else ""
            raise UserError(f"unknown keyword {name!r}. {near(name, (*FIELDS, *named))}{chat}")


def _settled(params: Params | None, own: Mapping[str, Any]) -> Params:
    """`params`, or the defaults, with some fields replaced."""
    if params is not None and not isinstance(params, Params):
        raise UserError(f"params={params!r} is no Params: give Params(max_tokens=64), or max_tokens=64 as a keyword")
    return replace(params or Params(), **own)
