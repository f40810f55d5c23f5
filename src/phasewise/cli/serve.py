"""`phasewise serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from phasewise.cli.asked import Targets
from phasewise.cli.options import DEFAULTS, EngineOptions, spread


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
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Serve a model over HTTP, for any OpenAI client.

    [bold]Examples[/]

      phasewise serve
      phasewise serve --model path/to/model --port 8011 --dtype bfloat16 --kv-bytes 2G
      phasewise serve --draft prompt_lookup:k=6 --evict snapkv:keep=0.25 --schedule sarathi:budget=256
      phasewise serve --schedule slo --slo-ttft 500 --slo-tpot 50
      phasewise serve --place disaggregated:prefill=1,decode=2 --cluster processes
    """
    engine.check()
    from phasewise.serve.app import run

    run(engine.llm, host=host, port=port, slo=Targets(slo_ttft, slo_tpot).slo())
