"""The offline API: `LLM(model, draft="prompt_lookup").generate(prompts, max_tokens=64)`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from phasewise.adapters import AGAIN, Adapters, Products
from phasewise.builder import build
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.engine.asleep import Asleep
from phasewise.engine.limits import Limits
from phasewise.engine.lora import LORA, Lora
from phasewise.errors import PhasewiseError, UserError, near
from phasewise.load import load_model, model_path
from phasewise.model.chat import ChatTemplate
from phasewise.model.model import Model
from phasewise.model.source import forget
from phasewise.model.tokenizer import Tokenizer, why_no_text
from phasewise.ops.native.room import let_go
from phasewise.options import lossy
from phasewise.request.params import SLO, Params
from phasewise.request.request import Departure, Request
from phasewise.request.score import Score
from phasewise.request.text import Text
from phasewise.request.trace import Trace
from phasewise.verbs.place import Placed

log = logging.getLogger(__name__)
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Stop = str | Sequence[str]
Recipes = Mapping[str, Mapping[str, str | None]]
BYTES = (bytes, bytearray, memoryview)  # of numbers, which are no token ids
FIELDS = tuple(field.name for field in fields(Params) if field.init)


@dataclass(frozen=True)
class Output:
    """The result of one request: `tokens` (an end token included), their `text` up to a stop string, how it left, and
    log-probabilities where they were asked for. `id` is its name, for requests that go on from its KV."""

    tokens: list[int]
    text: str
    left: Departure
    trace: Trace
    logprobs: list[Score] | None = None  # one per token, where logprobs or provenance are asked for
    prompt_logprobs: list[Score | None] | None = None  # one per token of the prompt; None before `scored_from`
    id: str = ""
    recalled: int = 0  # prompt tokens whose KV was given: an earlier request's, or made of another model's
    added: int = 0  # rows that a method has added to the prompt, which stand for no token and are in no count


class LLM:
    """A model with one method per verb, run in the calling thread.

    `model`: a name that `phasewise models` lists, a directory, a `.gguf` file or a hub id. Verbs are given as
    `draft="prompt_lookup:k=6"`; the others keep their defaults. `recipes` are other choices, by name, that single
    requests may ask for: {"fast": {"draft": "prompt_lookup:k=6"}}; verbs that a recipe does not name are as given here.
    `weights`: a form that linear layers are rounded into when they are loaded, such as "int4:group=64".
    `loras`: LoRA adapters, {name: folder}, that single requests may ask for: `lora="sql"`.
    Raises UserError naming whatever does not fit.

        llm = LLM("pocket", draft="prompt_lookup", evict="snapkv:keep=0.5")
        for output in llm.generate(["def add(", "import os"], max_tokens=32):
            print(output.text, output.left.reason, output.trace.ttft)
        print(llm.chat([{"role": "user", "content": "What is 17 + 25?"}], temperature=0.7).text)
        for piece in llm.stream("Once upon", stop=["."], max_tokens=20):
            print(piece, end="", flush=True)

    Every call takes the fields of `Params` as keywords, instead of `params` or beside it: they override its fields, for
    all prompts. What a method may be asked for is a keyword as well: `json_schema={...}` is
    `ask={"json_schema": {...}}`. Raises UserError for a keyword that nobody knows and for a value that `Params`
    refuses.
    """

    def __init__(
        self,
        model: str = "pocket",
        *,
        dtype: str | None = None,
        device: str = "cpu",
        weights: str | None = None,
        limits: Limits | None = None,
        recipes: Recipes | None = None,
        loras: Mapping[str, str] | None = None,
        **verbs: str | None,
    ) -> None:
        self.name = model
        texts = {name: dict(own) for name, own in (recipes or {}).items()}
        self._builder = builder = build(EngineSpec(model, limits or Limits(), dtype, device, verbs, texts, weights))
        self.limits = builder.limits
        self.model: Model = builder.model
        self.tokenizer = Tokenizer.load(model_path(model))
        self.recipes = tuple(builder.recipes)  # what requests may ask for, besides the default ""
        self.lossy: dict[str, list[str]] = {}  # by recipe, what may change answers
        self.asks: frozenset[str] = frozenset()  # names in `Params.ask` that some method takes
        self.adds: dict[str, int] = {}  # by recipe, rows that are added to every prompt and stand for no token
        self.named = {name: name for name in ("", *self.recipes)}  # what the engine calls each of them
        self._know({"": builder.methods, **builder.recipes})
        self.engine: Placed = builder.build()
        self.loras = Adapters(builder.limits)  # by name
        for name, path in (loras or {}).items():
            self.load_lora(name, path)

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
        lora: str | Sequence[str] = "",
        **own: Any,
    ) -> list[Output]:
        """One output per prompt (text or token ids), in order; all of them run together. A single prompt counts as a
        list of one.

        `params`, `recipe` and `lora` (an adapter's name): for all, or one for each; `own`: fields of `Params`, for all.
        `stop`: a string that ends the text, or several. `progress` is told how many requests have left, whenever it is
        more. Look at `Output.left`: a request that failed does not raise.
        """
        each, own = _several(prompts), self._asked(own)
        _refuse_unknown(own, "params", "stop", "progress", "recipe", "lora", *self.asks)
        if isinstance(params, Sequence):
            settings = [_settled(one, own) for one in params]
        else:
            settings = [_settled(params, own)] * len(each)
        recipes = [recipe] * len(each) if isinstance(recipe, str) else list(recipe)
        loras = [lora] * len(each) if isinstance(lora, str) else list(lora)
        for given, what in ((settings, "params"), (recipes, "recipes"), (loras, "loras")):
            if len(given) != len(each):
                raise UserError(f"{len(given)} {what} for {len(each)} prompts: give one, or one for each")
        requests = [
            self.request(self.encode(prompt), p, stop, recipe=self.with_lora(*both))
            for prompt, p, *both in zip(each, settings, recipes, loras)
        ]
        return self._complete(requests, stop, progress)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: Params | None = None,
        *,
        stop: Stop = (),
        recipe: str = "",
        lora: str = "",
        variables: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Iterator[str]:
        """Text as it comes, never half a character. Leaving the loop early cancels.

        `prompt` may be a conversation; then `variables` are as in `chat`. `own`: fields of `Params`. Raises
        PhasewiseError if the request fails on the way.
        """
        own = self._asked(own)
        _refuse_unknown(own, "params", "stop", "recipe", "variables", *self.asks)
        settings, ids = _settled(params, own), self._ids(prompt, variables)
        begins = _is_chat(prompt) and _begins(settings, variables)
        recipe = self.with_lora(recipe, lora)
        return self._pieces(self.request(ids, settings, stop, recipe=recipe, begins=begins), stop, begins)

    def chat(
        self,
        messages: Sequence[Message],
        params: Params | None = None,
        *,
        stop: Stop = (),
        recipe: str = "",
        lora: str = "",
        variables: Mapping[str, Any] | None = None,
        **own: Any,
    ) -> Output:
        """The assistant's answer to a conversation of {"role", "content"} messages.

        `variables` are for the chat template: {"enable_thinking": False}, {"tools": [...]}. `own`: fields of `Params`.
        Raises UserError if the model has no template.
        """
        own = self._asked(own)
        _refuse_unknown(own, "params", "stop", "recipe", "variables", *self.asks)
        settings, ids = _settled(params, own), self.encode_chat(messages, variables)
        begins = _begins(settings, variables)
        recipe = self.with_lora(recipe, lora)
        return self._complete([self.request(ids, settings, stop, recipe=recipe, begins=begins)], stop, None, begins)[0]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "mean", normalise: bool = True, recipe: str = "",
        lora: str = "",
    ) -> list[list[float]]:  # fmt: skip
        """A vector per prompt: the mean of its rows after the last layer and its norm, or the last of them
        (`pooling="last"`), of length 1 if `normalise`. A generative model's: nobody has trained them to be compared.

        Raises PhasewiseError if a prompt's vector cannot be computed.
        """
        params, recipe = Params(max_tokens=0, pooling=pooling), self.with_lora(recipe, lora)
        requests = [self.request(self.encode(prompt), params, recipe=recipe) for prompt in _several(prompts)]
        try:
            for request in requests:
                self.engine.add(request)
            self._run(requests, None)
        finally:
            for request in requests:
                self.engine.cancel(request)
        return [vector_of(request, normalise).tolist() for request in requests]

    def load_lora(self, name: str, path: str) -> None:
        """Let requests name a LoRA adapter, as PEFT saves it in the folder `path`. Raises UserError for one that does
        not fit the model, the KV budget or a method."""
        self.take_lora(self.loras.read(name, path, self.model.config))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests under way keep it. Raises UserError for a name that none has."""
        gone = self.loras.drop(name)
        self._builder.recipes = {name: own for name, own in self._builder.recipes.items() if name not in gone}
        self.engine.forget(gone)

    def close(self) -> None:
        """Dismiss workers in other processes, if there are any."""
        self.engine.close()

    # ---- what the server needs as well
    def take_lora(self, lora: Lora) -> None:
        """Let requests name an adapter that was read. Only between two steps. Raises UserError; nothing has changed
        then."""
        self.loras.check(lora.name)
        self._offer(self.loras.products(lora, self.named, self._methods), lora)

    def with_lora(self, recipe: str, lora: str) -> str:
        """What the engine calls a recipe with an adapter; "": none. Raises UserError for one that there is not."""
        return self.loras.recipe(lora, recipe) if lora else recipe

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises UserError for what is neither text nor token ids."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, BYTES) or not isinstance(prompt, Iterable):
            raise UserError(f"prompt: {why_no_text(prompt)}")
        return list(prompt)

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, add_special: bool = False
    ) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins.

        `variables` are for the chat template; `template` among them picks one by name. `add_special` puts around the
        prompt what is put around plain ones; most templates write it themselves. Raises UserError for `messages` among
        the variables.
        """
        variables = variables or {}
        taken = sorted({"messages", "self"} & variables.keys())
        if taken:
            raise UserError(f"variables must not have {' and '.join(taken)}: the chat template is given the messages")
        return self.tokenizer.encode(self.template.render(messages, **variables), add_special)

    def request(
        self, ids: Sequence[int], params: Params, stop: Stop = (), slo: SLO | None = None, recipe: str = "",
        shown: Collection[int] = (), begins: bool = False,
    ) -> Request:  # fmt: skip
        """A request that ends at a stop string as well. What `params` say in text, or of the prompt's length, is
        settled here. `begins`: its output begins a text, as a message does, and does not go on with the prompt's."""
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if params.bad_words:
            params = replace(params, bad_words=self._spelled(params.bad_words))
        watch = self.text(params, stop, shown, () if begins else ids).watch if stop else None
        return Request(ids, params, slo=slo, watch=watch, recipe=recipe)

    def revise(self, recipes: Recipes) -> dict[str, str]:
        """These recipes instead of those that requests could name so far: {name: what requests are to name it}.

        A recipe whose methods are others than before goes by another name inside, so that requests under way keep
        theirs. Only between two steps. Raises UserError, which changes nothing.
        """
        named, known, new = {}, self._builder.recipes, {}
        for name, methods in self._builder.parsed(recipes).items():
            ours = (own for own in known if own.partition(AGAIN)[0] == name)
            same = next((own for own in ours if known[own] == methods), None)
            named[name] = same or (f"{name}{AGAIN}{len(known)}" if name in known else name)
            if same is None:
                new[named[name]] = methods
        if new:
            self.engine.learn(new)
        self._builder.recipes = {**known, **new}
        self._know(new)
        self.recipes, self.named = tuple(named), {"": "", **named}
        for lora in self.loras.values():
            self._offer(self.loras.products(lora, self.named, self._methods), lora)
        return named

    def sleep(self) -> None:
        """Give back the memory of weights and KV until `wake`; only where all runs in this process, and with nothing
        under way. What had been counted stays."""
        assert not self.engine.workers and self.engine.idle
        self.engine.close()
        self.engine = cast(Placed, Asleep(self.engine))
        self.model = cast(Model, SimpleNamespace(config=self.model.config))
        self._builder = replace(self._builder, model=self.model, load=load_model)
        forget()
        gc.unfreeze()  # engines are circles, which a server has frozen
        gc.collect()
        let_go()

    def wake(self) -> None:
        """Load the weights again, with recipes and adapters. Raises UserError where the weights have gone;
        it sleeps on."""
        assert self._builder.spec is not None and isinstance(self.engine, Asleep)
        builder = build(self._builder.spec)
        known, adapted = self._builder.recipes, set(self.loras.recipes)
        builder.recipes = {name: own for name, own in known.items() if name not in adapted}
        engine = builder.build()
        for lora in self.loras:
            try:
                engine.learn(self.loras.methods(lora))
            except UserError as error:  # its files have gone: requests for others need not wait for them
                log.error("the adapter %r cannot be loaded again: %s", lora, error)
        builder.recipes = known
        self.engine.wake(engine)
        self._builder, self.model, self.engine = builder, builder.model, engine
        gc.freeze()

    def text(self, params: Params, stop: Stop = (), shown: Collection[int] = (), before: Sequence[int] = ()) -> Text:
        """A writer of the text of one output drawn with `params`; `shown` are special tokens that have text, `before`
        the prompt that it goes on with."""
        eos = () if params.ignore_eos else self.model.config.eos
        ends = () if params.include_stop_str_in_output else {*eos, *params.stop_tokens}
        return Text(self.tokenizer, stop, ends, params, shown, before)

    # ---- inside
    def _methods(self, recipe: str) -> Mapping[str, Any]:
        """Those of a recipe, by its name in the engine."""
        return self._builder.recipes[recipe] if recipe else self._builder.methods

    def _offer(self, products: Products, lora: Lora) -> None:
        """Have the engine learn an adapter's recipes, and forget those that it had before."""
        known = self._builder.recipes
        new = {name: {**own, LORA: lora} for name, own in products.methods.items() if name not in known}
        try:
            if new:
                self.engine.learn(new)
        except BaseException:
            self.engine.forget(new)  # some worker may have learned them
            raise
        before = self.loras.methods(lora.name).keys() - products.methods.keys()
        self._builder.recipes = {name: own for name, own in known.items() if name not in before} | products.methods
        self._know(products.methods)
        self.loras.take(products)
        if before:
            self.engine.forget(before)

    def _know(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Registers new recipes, and the methods of requests that name none."""
        self.lossy |= {name: lossy(own) for name, own in recipes.items()}
        self.adds |= {name: own["decode"].traits.added_rows for name, own in recipes.items()}
        every = [method for own in recipes.values() for method in own.values()]
        self.asks |= frozenset(name for method in every for name in method.traits.asks)

    def _asked(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords with those that methods take (`asks`) put into `ask`."""
        asked = {name: value for name, value in own.items() if name in self.asks and value is not None}
        rest = {name: value for name, value in own.items() if name not in self.asks}
        return {**rest, "ask": {**(rest.get("ask") or {}), **asked}} if asked else rest

    def _spelled(self, words: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Bad words as tokens: a text as it is written by itself, and after a space."""
        texts = [(word, " " + word.lstrip()) if isinstance(word, str) else (word,) for word in words]
        spelled = [self.tokenizer.encode(one, False) if isinstance(one, str) else one for two in texts for one in two]
        return tuple(dict.fromkeys(tuple(one) for one in spelled if one))

    def _ids(self, prompt: Prompt | Sequence[Message], variables: Mapping[str, Any] | None) -> list[int]:
        if _is_chat(prompt):
            return self.encode_chat(prompt, variables)  # type: ignore[arg-type]
        if variables:
            raise UserError(f"variables={variables!r} are for a chat template: give a list of messages with them")
        return self.encode(prompt)  # type: ignore[arg-type]

    def _complete(
        self,
        requests: Sequence[Request],
        stop: Stop,
        progress: Callable[[int], Any] | None = None,
        begins: bool = False,
    ) -> list[Output]:
        """The outputs of these requests, run together; `begins` as in `request`."""
        try:
            for request in requests:
                self.engine.add(request)
            self._run(requests, progress)
        finally:  # also when interrupted, or when a later prompt was refused
            for request in requests:
                self.engine.cancel(request)
        return [self._output(request, stop, begins) for request in requests]

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

    def _pieces(self, request: Request, stop: Stop, begins: bool) -> Iterator[str]:
        before = () if begins else request.tokens[: request.prompt_len]
        text, seen = self.text(request.params, stop, before=before), request.known
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

    def _output(self, request: Request, stop: Stop, begins: bool) -> Output:
        assert request.left is not None
        before = () if begins else request.tokens[: request.prompt_len]
        text = self.text(request.params, stop, before=before)
        written, params, scores = text.push(request.out) + text.flush(), request.params, request.scores
        return Output(
            request.out, written, request.left, request.trace,
            [scores[at] for at in range(request.prompt_len, request.known)] if params.tells else None,
            None if params.prompt_logprobs is None else [scores.get(at) for at in range(request.prompt_len)],
            request.id, request.recalled, self.adds[request.recipe],
        )  # fmt: skip


def _is_chat(prompt: Prompt | Sequence[Message]) -> bool:
    """True if this is a conversation."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def _begins(params: Params, variables: Mapping[str, Any] | None) -> bool:
    """True if the answer to a conversation begins a text: it goes on with the last message where that is asked for, and
    what is written under a grammar is that text and no other."""
    return params.ask is None and not (variables or {}).get("continue_final_message")


def vector_of(request: Request, normalise: bool) -> Tensor:
    """float32 [d], of a request that was asked for its `pooling` and has left."""
    if request.pool is None or request.left is None or request.left.how != "finished":
        raise PhasewiseError(f"the request failed: {request.left and request.left.reason}")
    vector = request.pool.total
    if request.params.pooling == "mean":
        vector = vector / request.pool.upto
    return normalize(vector, dim=0) if normalise else vector


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt counts as a list of one, and so does what is no prompt at all."""
    if isinstance(prompts, (str, *BYTES)) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    if prompts and isinstance(prompts[0], int):
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
