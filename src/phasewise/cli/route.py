"""`phasewise route`: one address for several servers."""

from __future__ import annotations

from typing import Annotated

import typer

from phasewise.cluster.prefix_routing import DECODING, ROUTES, PrefixRouting, check_route
from phasewise.errors import UserError


def route(
    to: Annotated[list[str], typer.Option(metavar="URL", help="Address of a server. May be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8080,
    by: Annotated[
        str,
        typer.Option(
            metavar="|".join(ROUTES),
            help="prefix: where the least is to be computed, cached prefixes aside; load: the same without the caches; "
            "turns: one server after the other.",
        ),
    ] = "prefix",
    weight: Annotated[
        float, typer.Option(help="Cost of a token of the requests that generate at a server, in tokens of a prompt.")
    ] = DECODING,
    kv_events: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Where a server publishes its KV events (`serve --kv-events`, vLLM), such as tcp://127.0.0.1:5557; "
            "one for each --to, in the same order. Default: the router learns from what it has sent.",
        ),
    ] = None,
    check_every: Annotated[
        float, typer.Option(min=0.05, metavar="SECONDS", help="Time between two looks at whether servers answer.")
    ] = 2.0,
) -> None:
    """Route requests among servers of one model: each goes where its prefix is cached, unless too much waits there.

    Any OpenAI-compatible servers will do. One that does not answer is left out
    until it does again, and its requests go to another one as long as nothing
    of their answers has arrived. Keys and errors are the servers' own.

    [bold]Examples[/]

      phasewise route --to http://127.0.0.1:8001 --to http://127.0.0.1:8002
      phasewise route --to http://a:8000 --to http://b:8000 --kv-events tcp://a:5557 --kv-events tcp://b:5557
      phasewise bench load --url http://127.0.0.1:8080 --workload turns:users=16,turns=6
    """
    try:
        check_route(by, weight)
    except UserError as error:
        raise UserError(f"--by: {error}" if by not in ROUTES else f"--{error}") from None
    try:
        from phasewise.serve.route.run import run
    except ImportError as error:
        raise UserError(f"routing needs the extra ({error}): pip install 'phasewise[route]'") from error
    policy = PrefixRouting(len(to), by, weight)  # type: ignore[arg-type]  # checked
    run(to, policy, host=host, port=port, interval=check_every, events=kv_events or ())
