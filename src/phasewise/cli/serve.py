"""`phasewise serve`: the OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from phasewise import recipes
from phasewise.cli import config as files
from phasewise.cli.asked import Targets
from phasewise.cli.options import DEFAULTS, EngineOptions, spread


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


RECIPES = Recipes()


@spread
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    slo_ttft: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Target of requests without one: time to first token.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Target of requests without one: per further token.")
    ] = None,
    choices: Recipes = RECIPES,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Serve a model over HTTP, for any OpenAI client.

    [bold]Examples[/]

      phasewise serve
      phasewise serve --model path/to/model --port 8011 --dtype bfloat16 --kv-bytes 2G
      phasewise serve --draft prompt_lookup:k=6 --evict snapkv:keep=0.25 --schedule sarathi:budget=256
      phasewise serve --schedule slo --slo-ttft 500 --slo-tpot 50
      phasewise serve --recipe fast="draft=prompt_lookup:k=6" --recipe long="evict=streaming store=int8"
      phasewise serve --config phasewise.toml
      phasewise serve --place disaggregated:prefill=1,decode=2 --cluster processes
    """
    engine.check()
    named = choices.named()
    from phasewise.serve.app import run

    run(partial(engine.llm, named), host=host, port=port, slo=Targets(slo_ttft, slo_tpot).slo())
