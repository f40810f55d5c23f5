"""`phasewise serve`: the OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise import recipes
from phasewise.cli import config as files
from phasewise.cli.asked import Targets
from phasewise.cli.options import DEFAULTS, EngineOptions, parse_bytes, spread
from phasewise.cli.progress import say
from phasewise.errors import UserError
from phasewise.known.models import KNOWN
from phasewise.serve.policy import Policy
from phasewise.serve.tools.formats import REASONING_FORMATS, TOOL_FORMATS, check

if TYPE_CHECKING:
    from phasewise.llm import LLM
    from phasewise.request.params import SLO


POLICY = Policy()


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000


@dataclass(frozen=True)
class Answers:
    """What answers aim at, how they are read, and which are kept."""

    slo_ttft: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Target of requests without one: time to first token.")
    ] = None
    slo_tpot: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Target of requests without one: per further token.")
    ] = None
    tool_format: Annotated[
        str,
        typer.Option(
            metavar="|".join(TOOL_FORMATS),
            help="How this model writes tool calls. auto: as its chat template does; none: requests with tools are "
            "refused.",
        ),
    ] = POLICY.tool_format
    reasoning_format: Annotated[
        str,
        typer.Option(
            metavar="|".join(REASONING_FORMATS),
            help="What stands around this model's reasoning. auto: what its chat template has; none: reasoning stays "
            "in the content.",
        ),
    ] = POLICY.reasoning_format
    stored_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Responses that later ones may refer to: 64M, 1G. Those not asked for the longest make way.",
        ),
    ] = f"{POLICY.stored_bytes >> 20}M"

    def slo(self) -> SLO:
        """The targets. Raises UserError."""
        return Targets(self.slo_ttft, self.slo_tpot).slo()

    def policy(self) -> Policy:
        """How answers are read and kept. Raises UserError."""
        check(self.tool_format, self.reasoning_format)
        return Policy(
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
            stored_bytes=parse_bytes(self.stored_bytes),
        )


@dataclass(frozen=True)
class Recipes:
    """What requests may choose from, and where options come from besides the command line."""

    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VERB=METHOD ...",
            help="Methods for requests to the model MODEL@NAME; verbs it does not name are as below. May be repeated.",
            show_default=False,
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML: options of this command by name, and a table \\[recipes.NAME] of verbs per recipe. "
            "What the command line says wins.",
            is_eager=True,
            callback=files.load,
        ),
    ] = None

    def named(self) -> dict[str, dict[str, str]]:
        """{recipe: {verb: method}}; the command line wins. Raises UserError."""
        return {**files.recipes_of(self.config), **recipes.read(self.recipe or ())}


ADDRESS, ANSWERS, RECIPES = Address(), Answers(), Recipes()
SERVED = replace(DEFAULTS, model="smollm2")  # who starts a server wants answers; the other commands stay offline
DRAFTER = "paced"  # answers stay the model's own, and it costs next to nothing where it gains nothing


@spread
def serve(
    context: typer.Context,
    address: Address = ADDRESS,
    answers: Answers = ANSWERS,
    choices: Recipes = RECIPES,
    engine: EngineOptions = SERVED,
) -> None:
    """Serve a model over HTTP, for any OpenAI client.

    Without --model that is smollm2, fetched once (93 MB); where it cannot be
    fetched, pocket is served instead, and a line says why. Unless --draft,
    --decode or --verify is given, guesses are copied from each request's own
    text as far as that pays (--draft paced), and judged by the model: answers
    stay its own. --draft none turns that off.

    [bold]Examples[/]

      phasewise serve
      phasewise serve --model pocket
      phasewise serve --model path/to/model --port 8011 --dtype bfloat16 --kv-bytes 2G
      phasewise serve --draft prompt_lookup:k=6 --evict snapkv:keep=0.25 --schedule sarathi:budget=256
      phasewise serve --schedule slo --slo-ttft 500 --slo-tpot 50
      phasewise serve --recipe fast="draft=prompt_lookup:k=6" --recipe long="evict=streaming store=int8"
      phasewise serve --config phasewise.toml
      phasewise serve --place disaggregated:prefill=1,decode=2 --cluster processes
    """
    if not engine.speaks_of_drafts:
        engine = replace(engine, draft=DRAFTER)
    policy, named = answers.policy(), choices.named()
    engine.check(named)
    source = context.get_parameter_source("model")
    asked = source is not None and source.name != "DEFAULT"
    from phasewise.serve.app import run

    def load() -> LLM:
        return (engine if asked else _or_pocket(engine)).llm(named)

    run(load, host=address.host, port=address.port, slo=answers.slo(), policy=policy)


def _or_pocket(engine: EngineOptions) -> EngineOptions:
    """With the default model if it is here or can be fetched, else with pocket, after a line that says why."""
    from phasewise.known.fetch import fetch

    try:
        fetch(KNOWN[engine.model], say=say, retries=1)  # without a network it should not take minutes to start
    except UserError as error:
        say(f"note: pocket is served instead: {' '.join(str(error).split())}")
        return replace(engine, model=DEFAULTS.model)
    return engine
