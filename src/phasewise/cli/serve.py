"""`phasewise serve`: the OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise import recipes
from phasewise.cli import config as files
from phasewise.cli.asked import Targets
from phasewise.cli.batch import BatchOptions
from phasewise.cli.lora import LoraOptions
from phasewise.cli.options import DEFAULTS, DRAFTER, EngineOptions, parse_bytes, spread
from phasewise.cli.progress import say
from phasewise.errors import UserError
from phasewise.known.models import KNOWN
from phasewise.serve.guard.policy import LOG_FORMATS, Caps, ServePolicy
from phasewise.serve.tools.formats import REASONING_FORMATS, TOOL_FORMATS, check

if TYPE_CHECKING:
    from phasewise.llm import LLM
    from phasewise.request.params import SLO


POLICY = ServePolicy()
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """The address of the server."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000


@dataclass(frozen=True)
class Offer:
    """The model's name and targets, the formats of its answers, and the memory for stored ones."""

    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model for clients. Default: --model, of a path its last part."),
    ] = None
    slo_ttft: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Default target for the time to first token.")
    ] = None
    slo_tpot: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Default target for the time per further token.")
    ] = None
    refuse_late: Annotated[
        bool,
        typer.Option("--refuse-late", help="Answer 429 to requests whose first token would miss its target."),
    ] = False
    tool_format: Annotated[
        str,
        typer.Option(
            "--tool-format",
            "--tools",
            metavar="|".join(TOOL_FORMATS),
            help="Format of the model's tool calls. auto: read from its chat template; none: refuse "
            "requests with tools; generic: a system message tells of them, for models whose template shows none.",
        ),
    ] = POLICY.tool_format
    reasoning_format: Annotated[
        str,
        typer.Option(
            metavar="|".join(REASONING_FORMATS),
            help="Tags around the model's reasoning. auto: read from its chat template; none: leave "
            "reasoning in the content.",
        ),
    ] = POLICY.reasoning_format
    allow_templates: Annotated[
        bool,
        typer.Option(
            "--allow-templates", help="Let requests bring a chat_template. Each is rendered in a process of its own."
        ),
    ] = False
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|none|PATH",
            help="Sampling of requests that say nothing. auto: as the model's generation_config.json recommends; none: "
            "temperature 1 over the whole vocabulary; a path: as that file, or the one in that folder, says.",
        ),
    ] = POLICY.generation_config
    no_playground: Annotated[bool, typer.Option("--no-playground", help="Do not serve the playground at /.")] = False
    stored_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory for stored responses that later requests may continue, such as 64M. The least "
            "recently used are dropped.",
        ),
    ] = f"{POLICY.stored_bytes >> 20}M"

    def slo(self) -> SLO:
        """The targets. Raises UserError."""
        return Targets(self.slo_ttft, self.slo_tpot).slo()

    def within(self, policy: ServePolicy) -> ServePolicy:
        """The policy with what is said here. Raises UserError."""
        check(self.tool_format, self.reasoning_format)
        return replace(
            policy,
            refuse_late=self.refuse_late,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
            allow_templates=self.allow_templates,
            generation_config=self.generation_config,
            stored_bytes=parse_bytes(self.stored_bytes),
            playground=not self.no_playground,
        )


@dataclass(frozen=True)
class Access:
    """Keys, limits, logs and TLS."""

    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file of API keys and their limits (see `phasewise keys`). SIGHUP reloads it. "
            "Default: no key is needed.",
        ),
    ] = None
    open_metrics: Annotated[
        bool,
        typer.Option(
            "--open-metrics", help="Serve /metrics without a key. Otherwise it needs a key with metrics = true."
        ),
    ] = False
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate (chain) for HTTPS, PEM.")] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key for HTTPS, PEM.")] = None
    log_format: Annotated[
        str | None,
        typer.Option(metavar="text|json", help="Log a line per request to stderr. Default: errors only."),
    ] = None
    sleep_after: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS",
            help="Free weights and KV after this time without a request. The next request waits until they are loaded "
            "again. Default: never.",
        ),
    ] = None  # fmt: skip
    keep_alive: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Time that a connection without a request stays open."),
    ] = POLICY.keep_alive
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web origin whose pages may ask this server (CORS), such as https://chat.example; '*': all. May be "
            "repeated, or a JSON list. Default: none.",
            show_default=False,
        ),
    ] = None
    kv_events: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Publish which blocks of prompts are cached, as vLLM does over ZeroMQ, for routers: such as "
            "tcp://127.0.0.1:5557.",
        ),
    ] = None
    otel: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send OpenTelemetry traces to this collector, such as http://localhost:4318."),
    ] = None
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Most tokens of a prompt.")] = None
    max_n: Annotated[int | None, typer.Option(min=1, help="Most answers of a request: its prompts times n.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None
    timeout: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="Longest time for a whole request.")
    ] = None
    write_timeout: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="Longest time that a client may read nothing of its answer."),
    ] = POLICY.write_timeout

    def policy(self) -> ServePolicy:
        """The same for the server."""
        if self.log_format not in (None, *LOG_FORMATS):
            raise UserError(f"--log-format {self.log_format}: there are {' and '.join(LOG_FORMATS)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("HTTPS needs both --tls-cert and --tls-key")
        tls = None if self.tls_cert is None or self.tls_key is None else (self.tls_cert, self.tls_key)
        caps = Caps(self.max_prompt, self.max_n, self.max_tokens, self.timeout)
        watched = ServePolicy(
            sleep_after=self.sleep_after,
            kv_events=self.kv_events,
            otel=self.otel,
            log=self.log_format,
            open_metrics=self.open_metrics,
        )
        return replace(
            watched, keys=self.keys, tls=tls, caps=caps, write_timeout=self.write_timeout, keep_alive=self.keep_alive,
            origins=tuple(origin for text in self.allowed_origins or () for origin in _origins(text)),
        )  # fmt: skip


def _origins(text: str) -> list[str]:
    """Origins of an option: one, or a JSON list. Raises UserError for what is none."""
    try:
        found = json.loads(text) if text.startswith("[") else [text]
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) and ORIGIN.fullmatch(each) for each in found):
        raise UserError(f"--allowed-origins {text}: give '*', or scheme and host such as https://chat.example")
    return found


@dataclass(frozen=True)
class Recipes:
    """Recipes, and the file of options."""

    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VERB=METHOD ...",
            help="A recipe: methods for requests to the model MODEL@NAME. Verbs that it does not name are "
            "those of the options below. May be repeated.",
            show_default=False,
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with options of this command by name, and a table \\[recipes.NAME] per recipe. "
            "The command line overrides it. SIGHUP reloads the recipes.",
            is_eager=True,
            callback=files.load,
        ),
    ] = None

    def named(self) -> dict[str, dict[str, str]]:
        """{recipe: {verb: method}}; the command line wins. Raises UserError."""
        return {**files.recipes_of(self.config), **recipes.read(self.recipe or ())}

    def within(self, policy: ServePolicy) -> ServePolicy:
        """The policy with where recipes are read again."""
        if self.config is None:
            return policy
        return replace(policy, recipes=files.OptionsFile(self.config, recipes.read(self.recipe or ())))


@dataclass(frozen=True)
class Many:
    """Many models behind one server."""

    models: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Serve many models by name: a TOML, YAML or JSON file of them, or a folder of models. Each is loaded "
            "when a request names it, and the options here are those of all. Instead of --model.",
        ),
    ] = None
    models_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory for weights and KV budgets of all loaded models, such as 16G. Where it is short, the "
            "model not asked for the longest is unloaded. Default: three quarters of memory.",
        ),
    ] = None
    load_wait: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS",
            help="Longest time that a request waits for its model to be loaded before it gets 503. Streams wait "
            "until it is loaded, and are told how far it is.",
        ),
    ] = 60.0  # fmt: skip

    def serve(
        self, address: Address, engine: EngineOptions, policy: ServePolicy, named: Mapping[str, Mapping[str, str]],
        slo: SLO, adapters: LoraOptions,
    ) -> None:  # fmt: skip
        """Serve them. Raises UserError."""
        assert self.models is not None
        adapters.refuse("with --models each adapter is named in the file, under [MODEL.loras]")
        from phasewise.cli.served_models import SharedOptions, entries

        limit = parse_bytes(self.models_memory) if self.models_memory else memory() * 3 // 4
        if engine.kv_bytes is None:  # what suits one model alone would leave no room for others
            engine = replace(engine, kv_bytes=str(min(engine.limits().budget, limit // 4)))
        common = SharedOptions(engine, named, policy, slo, adapters.max_loras, adapters.max_lora_rank)
        found = entries(self.models, common)
        try:
            from phasewise.serve.registry.app import run_models
        except ImportError as error:
            raise UserError(f"serving needs the extra ({error}): pip install 'phasewise[serve]'") from error
        run_models(
            found, limit=limit, wait=self.load_wait, host=address.host, port=address.port,
            policy=replace(policy, sleep_after=None),
        )  # fmt: skip


ADDRESS, OFFER, ACCESS, RECIPES, MANY = Address(), Offer(), Access(), Recipes(), Many()
BATCHES = BatchOptions()
LORAS = LoraOptions()
SERVED = replace(DEFAULTS, model="smollm2")  # who starts a server wants answers; the other commands stay offline


@spread
def serve(
    context: typer.Context,
    address: Address = ADDRESS,
    offer: Offer = OFFER,
    access: Access = ACCESS,
    choices: Recipes = RECIPES,
    many: Many = MANY,
    batches: BatchOptions = BATCHES,
    adapters: LoraOptions = LORAS,
    engine: EngineOptions = SERVED,
) -> None:
    """Serve a model over HTTP to any OpenAI or Anthropic client.

    Without --model, smollm2 is served. It is fetched once (93 MB). If it cannot
    be fetched, pocket is served instead, and a line says why.

    Unless --draft, --decode or --verify is given, the server drafts (--draft
    paced): it copies guesses from each request's own text as far as that pays,
    and the model verifies them, so answers stay its own. --draft none turns
    drafting off.

    [bold]Examples[/]

      phasewise serve
      phasewise serve --model pocket
      phasewise serve --models models.toml --models-memory 16G
      phasewise serve --model path/to/model --port 8011 --dtype bfloat16 --kv-bytes 2G
      phasewise serve --draft prompt_lookup:k=6 --evict snapkv:keep=0.25 --schedule sarathi:budget=256
      phasewise serve --schedule slo --slo-ttft 500 --slo-tpot 50
      phasewise serve --recipe fast="draft=prompt_lookup:k=6" --recipe long="evict=streaming store=int8"
      phasewise serve --batches ~/batches
      phasewise serve --model base --lora sql=adapters/sql --lora chat=adapters/chat
      phasewise serve --config phasewise.toml
      phasewise serve --host 0.0.0.0 --keys keys.toml
      phasewise serve --place disaggregated:prefill=1,decode=2 --cluster processes
    """
    policy = replace(choices.within(offer.within(access.policy())), batches=batches.policy())
    named = choices.named()
    source = context.get_parameter_source("model")
    asked = source is not None and source.name != "DEFAULT"
    if many.models is not None:
        if asked or offer.name is not None:
            raise UserError("--models names the models that are served: leave --model and --name out")
        many.serve(address, engine, policy, named, offer.slo(), adapters)
        return
    policy, loras = adapters.within(policy), adapters.named()
    most = {"max_loras": adapters.max_loras, "max_lora_rank": adapters.max_lora_rank}
    if not engine.speaks_of_drafts:
        engine = replace(engine, draft=DRAFTER)
    engine.check(named)
    from phasewise.serve.app import run

    def load() -> LLM:
        return (engine if asked else _or_pocket(engine)).llm(named, loras, **most)

    run(load, host=address.host, port=address.port, name=offer.name, slo=offer.slo(), policy=policy)


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _or_pocket(engine: EngineOptions) -> EngineOptions:
    """The options with the default model if it can be had, else with pocket, after a line that says why."""
    from phasewise.known.fetch import fetch

    try:
        fetch(KNOWN[engine.model], say=say, retries=1)  # without a network it should not take minutes to start
    except UserError as error:
        say(f"note: serving pocket instead of smollm2: {' '.join(str(error).split())}")
        return replace(engine, model=DEFAULTS.model)
    return engine
