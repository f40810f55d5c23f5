"""The endpoints: from a request's body to an order for the engine, and its answer back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.routing import Match

from phasewise.adapters import Adapters
from phasewise.errors import BudgetError, UserError, near
from phasewise.llm import LLM
from phasewise.load import files_of
from phasewise.methods.sample._grammars import KINDS
from phasewise.model import generation
from phasewise.request.params import SLO, Params
from phasewise.request.request import Request as EngineRequest
from phasewise.serve.about import About
from phasewise.serve.adapters import AdapterEndpoints
from phasewise.serve.completions.answer import Answer, GenerationRequest, LogprobOptions
from phasewise.serve.completions.conversation import ChatRenderer, Prompt
from phasewise.serve.completions.conversation_index import ConversationIndex
from phasewise.serve.completions.infill import Infill
from phasewise.serve.completions.schema import AS_MANY_AS_FIT, Ask, ChatAsk, CompletionAsk, read
from phasewise.serve.completions.stream import Bodies, EventStream, Writer
from phasewise.serve.completions.wire import CHAT, COMPLETION, AnswerWriter, EndpointFormat
from phasewise.serve.failures import ApiError, api_error, error_response, json_response, without_paths
from phasewise.serve.guard.context import CURRENT, note
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.guard.slo_admission import FirstSequence, SLOAdmission
from phasewise.serve.idle_unloader import IdleUnloader
from phasewise.serve.loop import EngineLoop
from phasewise.serve.messages.ask import error_body
from phasewise.serve.messages.endpoint import Messages
from phasewise.serve.responses.endpoint import Responses, Stored
from phasewise.serve.scores.embeddings import Embeddings
from phasewise.serve.scores.scoring import ScoringEndpoint
from phasewise.serve.tools.asked import strict
from phasewise.serve.watch.events import ENDLESS, Events
from phasewise.serve.watch.kv_publisher import publisher
from phasewise.serve.watch.metrics import Metrics

INLINE = 4096  # characters or tokens; what is longer is read by a worker thread, so that streams go on meanwhile
SLACK = 4  # times as many characters as the longest tokens have: normalising may shorten a text
TEMPLATES = 2  # of requests, that are rendered at a time
T = TypeVar("T")
A = TypeVar("A", bound=BaseModel)


class Service:
    """A model behind HTTP. `name` is what clients call it, and `name@recipe` where they want one of its recipes.

    `slo`: the targets of requests that name none. `stored`: responses that others have kept, too. Raises UserError for
    a policy that cannot be.
    """

    def __init__(
        self, llm: LLM, name: str, policy: ServePolicy, slo: SLO | None = None, stored: Stored | None = None
    ) -> None:
        self.llm, self.name, self.created = llm, name, int(time.time())
        _refuse_budget(llm)
        self.slo = slo or SLO()
        self.sampling = _sampling(llm, policy.generation_config)  # of requests that say nothing
        self.names = _names(name, {recipe: recipe for recipe in llm.recipes}, llm.loras)  # {what clients say: a recipe}
        self.metrics = Metrics(llm.limits.budget, [*llm.recipes, *llm.loras.recipes], llm.loras)
        self.engine = EngineLoop(llm.engine, llm.limits.max_running + policy.queue, self.metrics.left)
        at = policy.kv_events
        self.kv_events = None if at is None else publisher(llm.engine, at, policy.sleep_after is not None)
        self._punctual = SLOAdmission() if policy.refuse_late else None
        self.sleeper = IdleUnloader(llm, self.engine, policy.sleep_after)
        if policy.sleep_after is not None:
            self.metrics.registry.register(self.sleeper)
        self._conversations = ChatRenderer(llm, policy)
        self._apart = ThreadPoolExecutor(TEMPLATES, "templates")
        self._infill = Infill(llm.tokenizer)
        self._bodies, self._about = Bodies(), About(self)
        self.responses = Responses(self, stored or Stored(policy.stored_bytes))
        self._earlier = ConversationIndex()
        self.posts: list[tuple[str, Callable[[Request], Awaitable[Response]], type[BaseModel]]] = [
            ("/v1/completions", self.completions, CompletionAsk),
            ("/v1/chat/completions", self.chat, ChatAsk),
            *Messages(self).posts,
            *self.responses.posts,
            *self._about.posts,
            *ScoringEndpoint(self).posts,
            *Embeddings(self).posts,
            *AdapterEndpoints(self, policy.lora_folder).posts,
        ]
        self.gets = self._about.gets
        self.events: Events | None = None

    # ---- endpoints
    async def health(self) -> Response:
        """200 while requests are taken, 503 once the engine has failed or the server shuts down."""
        if self.engine.failed is not None:
            return json_response({"status": "failed", "reason": without_paths(self.engine.failed)}, 503)
        if self.engine.stopping:
            return json_response({"status": "stopping"}, 503)
        asleep = {"asleep": True} if self.sleeper.asleep else {}
        return json_response({"status": "ok", "model": self.name, **asleep})

    async def show_metrics(self) -> Response:
        """Prometheus' exposition format."""
        snapshot = await self.engine.snapshot()
        return Response(self.metrics.render(snapshot), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """The one model, by itself and with each of its recipes, as far as the key may use them."""
        exchange = CURRENT.get()
        names = [name for name in self.names if exchange is None or exchange.may(name)]
        return json_response({"object": "list", "data": [self.card(name) for name in names]})

    async def model(self, name: str) -> Response:
        """The model, if that is one of its names."""
        self.recipe(name)
        return json_response(self.card(name))

    async def completions(self, request: Request) -> Response:
        """Text that continues each prompt."""
        ask = await self.read(CompletionAsk, request)
        self.recipe(ask.model)
        for each in ask.prompt:
            self._fits(len(each) if isinstance(each, str) else 0, ask, "prompt")
        prompts = await self._worker(sum(map(len, ask.prompt)), lambda: [self._encode(ask, p) for p in ask.prompt])
        leads: Sequence[str] = ()
        if ask.echo:
            whole = ask.truncate_prompt_tokens is None
            leads = [
                p if isinstance(p, str) and whole else self.llm.tokenizer.decode(ids)
                for p, ids in zip(ask.prompt, prompts)
            ]
        order = self._order(ask, prompts, "prompt", leads)
        if ask.suffix:
            ends = (*order.params.stop_tokens, *self._infill.ends)
            order = replace(order, params=replace(order.params, stop_tokens=ends))
        return await self._answer(request, ask, order, COMPLETION)

    async def chat(self, request: Request) -> Response:
        """The assistant's next message."""
        ask = await self.read(ChatAsk, request)
        return await self._answer(request, ask, await self.order_chat(ask), CHAT)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The response to any exception."""
        known = api_error(error)
        if known.status == 405:
            known.headers["Allow"] = ", ".join(_allowed(request))
        self.metrics.errors[known.status] += 1
        note(known)
        if request.url.path.startswith("/v1/messages"):
            return json_response(error_body(known), known.status)
        return error_response(known)

    def start(self) -> None:
        """The engine's thread begins; the event loop runs."""
        self.engine.start()
        self.sleeper.rest()

    def stop(self) -> None:
        """All is over."""
        self.sleeper.close()
        self.engine.stop()
        if self.kv_events is not None:
            self.kv_events.close()

    def close(self) -> None:
        """Take nothing new: the server is shutting down."""
        self.engine.stopping = True
        self._bodies.close()
        if self.events is not None:
            self.events.close()

    def card(self, name: str) -> dict[str, Any]:
        """What `/v1/models` says of one of its names."""
        reach = self.llm.engine.reach(self.names[name])
        return {"id": name, "object": "model", "created": self.created, "owned_by": "phasewise",
                "max_model_len": reach, "default_sampling_params": self.sampling,
                "parent": self.name if name.partition("@")[0] in self.llm.loras else None}  # fmt: skip

    def cancel_all(self) -> None:
        """Drop everything, at the end of a shutdown's patience."""
        self.engine.cancel_all()

    async def revise(self, recipes: Mapping[str, Mapping[str, str]]) -> None:
        """These recipes from now on; requests under way keep theirs. Raises UserError, which changes nothing."""
        self.sleeper.enter()
        try:
            await self.sleeper.awake()
            await self.engine.between(lambda: self.llm.revise(recipes))
        finally:
            self.sleeper.leave()
        self.rename()

    def rename(self) -> None:
        """What clients may say from now on: the recipes and adapters that there are now."""
        named = {public: recipe for public, recipe in self.llm.named.items() if public}
        names = _names(self.name, named, self.llm.loras)
        self.names.clear()
        self.names |= names

    # ---- what other endpoints share
    async def order_chat(self, ask: ChatAsk) -> GenerationRequest:
        """Builds the generation request of a conversation."""
        self.recipe(ask.model)
        prompt = await self.prompt(ask)
        order = self._order(ask, [_cut(ask, prompt.ids)], "messages", [prompt.lead] if prompt.lead else ())
        own = {what: value for what, value in (order.params.ask or {}).items() if not prompt.alone or what not in KINDS}
        asks = {**own, **(prompt.ask or {})} or None
        order = replace(order, params=replace(order.params, ask=asks))
        return replace(order, manner=prompt.manner, shown=prompt.shown, begins=prompt.begins)

    def recipe(self, name: str | None) -> str:
        """The recipe that a model's name asks for. Raises ApiError for any other name, or one that is not its key's."""
        recipe = "" if name is None else self.names.get(name)
        if recipe is not None:
            if (exchange := CURRENT.get()) is not None:
                exchange.permit(name or self.name)
            return recipe
        has = f"this server has {self.name!r}" if len(self.names) == 1 else near(str(name), self.names)
        has = self._without(str(name)) or has
        raise ApiError(404, f"there is no model {name!r}; {has}", "model", "model_not_found")

    async def prompt(self, ask: ChatAsk) -> Prompt:
        """The prompt of a conversation."""
        why = partial(self._why, ask.params(self.sampling), self.recipe(ask.model))
        work = partial(self._conversations.prompt, ask, why)
        if ask.chat_template is not None:  # takes its time, and none of the threads that others need
            return await asyncio.get_running_loop().run_in_executor(self._apart, work)
        size = sum(_characters(message["content"]) for message in ask.messages)
        self._fits(size, ask, "messages")
        held = ask.tools and (strict(ask.tools) or ask.tool_choice not in (None, "auto", "none") or ask.structure())
        slow = held or ask.budget() is not None  # a grammar may take long, and so does reading the vocabulary once
        return await self._worker(INLINE if slow else size, work)

    async def read(self, kind: type[A], request: Request) -> A:
        """The body of a request."""
        body = await self._bodies.read(request)
        return await self._worker(len(body), lambda: read(kind, body))

    # ---- inside
    async def _answer(self, request: Request, ask: Ask, order: GenerationRequest, format: EndpointFormat) -> Response:
        wire = AnswerWriter(
            format, ask.model or self.name, ask.asks_for("include_usage"), ask.asks_for("continuous_usage_stats")
        )
        structure = ask.structure()
        return await self.respond(request, order, wire, structure and structure.field)

    async def respond(
        self, request: Request, order: GenerationRequest, writer: Writer, structure: str | None = None
    ) -> Response:
        """The answer to an order, as this writer writes it. `structure` is the field that says which texts are
        wanted."""
        if order.params.ask is not None:
            await self._prepare(order, structure)
        answer = Answer(self.llm, self.engine, order)
        exchange = CURRENT.get()
        if self._punctual is None or (exchange is not None and exchange.background):  # nobody waits for those
            await answer.start()
        else:
            target = None if order.slo is None else order.slo.ttft
            with self._punctual.admitted(FirstSequence(answer.choices[0].feed), target):
                await answer.start()
        self.metrics.took(order.recipe, len(answer.choices), answer.prompt_tokens)
        if order.stream:
            self._note(writer, answer)
            return EventStream(answer, writer)
        async with answer.attended(request.receive):
            pieces = await answer.whole()
            self._note(writer, answer)
            return json_response(writer.body(answer, pieces))

    def _note(self, writer: Writer, answer: Answer) -> None:
        """Others may go on from it, where some recipe knows how."""
        if "after" in self.llm.asks:
            self._earlier.note(writer.id, answer.choices)

    def _going_on(self, ask: Ask, params: Params, recipe: str) -> Params:
        """The same, of a request that names an earlier answer. Raises ApiError."""
        if ask.after is None:
            return params
        reason = self._why(params, recipe, {"after": ask.after})
        if reason is not None:
            raise ApiError(400, reason, "after", "unsupported_parameter")
        if ask.exact:
            raise ApiError(400, "exact was asked for, and after takes KV that has not read what is edited before it: "
                           "leave one out", "after", "invalid_value")  # fmt: skip
        return replace(params, ask={**(params.ask or {}), "after": self._earlier.request(ask.after)})

    def _fits(self, characters: int, ask: Ask, param: str) -> None:
        """Raise ApiError for a text that is too long whatever its tokens are: counting them takes long."""
        context = self.llm.engine.reach(self.recipe(ask.model))
        if ask.truncate_prompt_tokens is None and characters > SLACK * context * self.llm.tokenizer.longest:
            said = f"the model's context is {context} tokens, but this asks for {characters:,} characters of prompt"
            raise ApiError(400, f"{said}: shorten it", param, "context_length_exceeded")

    def _encode(self, ask: CompletionAsk, prompt: str | list[int]) -> list[int]:
        if ask.suffix:
            return self._infill.prompt(prompt, ask.suffix, ask.add_special_tokens is not False)
        if isinstance(prompt, str):
            prompt = self.llm.tokenizer.encode(prompt, ask.add_special_tokens is not False)
        return _cut(ask, prompt)

    async def _prepare(self, order: GenerationRequest, field: str | None) -> None:
        """Checks and prepares what a request asks for, while streams go on."""
        try:
            await asyncio.to_thread(self.llm.engine.prepare, order.params, order.recipe)
        except UserError as error:
            raise ApiError(400, str(error), field, "invalid_value") from error

    def _why(self, params: Params, recipe: str, asked: dict[str, Any]) -> str | None:
        """Why what is asked cannot be honoured in a request with these params; None: it can."""
        try:
            self.llm.engine.prepare(replace(params, ask=asked), recipe)
        except UserError as error:
            return str(error)
        return None

    def _order(
        self, ask: Ask, prompts: Sequence[Sequence[int]], param: str, leads: Sequence[str] = ()
    ) -> GenerationRequest:
        slo, recipe = ask.targets(self.slo), self.recipe(ask.model)
        params, asked, context = ask.params(self.sampling), ask.limit(), self.llm.engine.reach(recipe)
        if ask.exact and self.llm.lossy[recipe]:
            self._refuse_lossy(recipe)
        longest = max(map(len, prompts))
        _check_context(context, longest, ask.min_tokens or 0, param)
        room = context - longest
        cut = asked is not None and asked > room  # such an answer ends with the context
        if cut:
            params = replace(params, max_tokens=room)
        self._check_tokens("logit_bias", params.logit_bias)
        self._check_tokens("stop_token_ids", params.stop_tokens)
        self._check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        own = self.llm.model.config.max_positions
        if asked in (None, AS_MANY_AS_FIT) and context > own:  # such an answer ends with the context, or is one long
            fits = own - longest if longest < own else own
            params = replace(params, max_tokens=min(params.max_tokens, fits))
        params = self._going_on(ask, params, recipe)
        samples, told = ask.samples(), LogprobOptions(ask.told(), ask.prompt_logprobs)
        best = ask.n or 1 if samples > (ask.n or 1) else None
        if best is not None and params.logprobs is None:
            params = replace(params, logprobs=0)
        order = GenerationRequest(
            prompts, params, samples, ask.stop or (), leads, told, bool(ask.stream), slo, recipe, best, ask.timeout
        )
        exchange = CURRENT.get()
        order = order if exchange is None else exchange.within(order, ask.stated(), param)
        if cut and order.params.max_tokens == room:  # as many as fit, in the KV budget too
            order = replace(order, params=replace(order.params, max_tokens=AS_MANY_AS_FIT))
        return order

    def _refuse_lossy(self, recipe: str) -> NoReturn:
        others = [name for name, own in self.names.items() if not self.llm.lossy[own]]
        fix = f"ask for {' or '.join(others)}, or leave exact out" if others else "leave exact out"
        named = ", ".join(text.partition(" ")[0] for text in self.llm.lossy[recipe])
        raise ApiError(400, f"exact was asked for, but this model answers with {named}: {fix}", "exact")

    def _check_tokens(self, param: str, tokens: Any) -> None:
        vocab = self.llm.model.config.vocab
        bad = next((token for token in tokens if not 0 <= token < vocab), None)
        if bad is not None:
            raise ApiError(400, f"{param}: token id {bad} is outside the vocabulary of {vocab}", param, "invalid_value")

    def _without(self, name: str) -> str:
        """Why an adapter cannot be had with a recipe; "" where `name` is no such thing."""
        adapter, _, recipe = name.partition("@")
        return self.llm.loras.known(adapter).refused.get(recipe, "") if adapter in self.llm.loras else ""

    async def _worker(self, size: int, work: Callable[[], T]) -> T:
        return work() if size < INLINE else await asyncio.to_thread(work)


def _refuse_budget(llm: LLM) -> None:
    """Raise UserError where the KV budget is too small for the shortest request: the server would refuse all."""
    for recipe in ("", *llm.recipes):
        try:
            llm.engine.check(EngineRequest([0], Params(max_tokens=1), recipe=recipe))
        except BudgetError as error:
            raise UserError(f"not even a prompt of one token can be served: {error}") from error
        except UserError:  # a method that asks more of its requests
            continue


def _check_context(context: int, prompt: int, least: int, param: str) -> None:
    """Raise ApiError for a prompt of so many tokens that leaves no room for `least` tokens of output, or for one."""
    if prompt >= context or prompt + least > context:
        raise ApiError(
            400,
            f"the model's context is {context} tokens, but this asks for {prompt} of prompt"
            + (f" and at least {least} of output" if least else "") + ": shorten it",
            param, "context_length_exceeded",
        )  # fmt: skip


def _allowed(request: Request) -> list[str]:
    """The methods that the path of a request takes."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(dict(request.scope))[0] is not Match.NONE:
            found |= set(route.methods or ())
    return sorted(found | ({"HEAD"} if "GET" in found and request.url.path != ENDLESS else set()))


def _sampling(llm: LLM, chosen: str) -> dict[str, Any]:
    """The sampling of requests that say nothing. Raises UserError for a file that is wrong or not there."""
    if chosen == "none":
        return {}
    if chosen != "auto":
        return generation.read(Path(chosen).expanduser())
    files = files_of(llm.name)
    return generation.recommended(files.generation(), files.path / generation.FILE)


def _names(model: str, recipes: Mapping[str, str], loras: Adapters) -> dict[str, str]:
    """Raises UserError for an adapter that is called like the model."""
    found = {model: ""} | {f"{model}@{name}": recipe for name, recipe in recipes.items()}
    for lora in loras:
        own = {f"{lora}@{name}" if name else lora: recipe for name, recipe in loras.known(lora).named.items()}
        if not own.keys().isdisjoint(found):
            raise UserError(f"the adapter {lora!r} is called like the model: give it another name")
        found |= own
    return found


def _characters(content: str | Sequence[Mapping[str, str]]) -> int:
    """Those of a message's content, which may be in parts."""
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _cut(ask: Ask, prompt: list[int]) -> list[int]:
    """The last tokens of a prompt, where so many are asked for."""
    return prompt if ask.truncate_prompt_tokens is None else prompt[-ask.truncate_prompt_tokens :]
