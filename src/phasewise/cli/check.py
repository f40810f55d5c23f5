"""`phasewise check`: the laws of determinism, asked of a running server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.progress import say
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.check.run import Checked, CheckSettings


def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server, such as http://localhost:8000.")],
    model: Annotated[
        str | None, typer.Option(help="Name of the model for requests. Default: the first that the server lists.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="API key, where the server needs one.")] = None,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 48,
    mates: Annotated[int, typer.Option(min=2, help="Requests at once, where others must not matter.")] = 8,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the prompts. Default: another one each time, so that nothing is cached."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Longest time for one answer.")] = 120.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was asked and found as JSON.")
    ] = None,
) -> None:
    """Ask a server whether answers depend on anything but their request.

    Any OpenAI-compatible server will do. Each law asks the same thing twice, in
    two ways that must not matter: alone and among others, with and without a
    cached beginning, whole and streamed. It asks for standard fields only, and
    skips what the server does not offer. Run it while nobody else uses the
    server.

    Exit code: 0 where no law is broken, 1 where one is, 2 where the server
    cannot be asked.

    [bold]Examples[/]

      phasewise check http://localhost:8000
      phasewise check http://localhost:8000 --model smollm2 --mates 16 --json check.json
    """
    from phasewise.check.run import CheckSettings

    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url} is no address: write http://HOST:PORT")
    found = asyncio.run(
        _ask(url.rstrip("/").removesuffix("/v1"), key, timeout, CheckSettings(model, tokens, mates, seed))
    )
    _show(found)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(found.plain(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {json_file} cannot be written: {error.strerror or error}") from error
    raise typer.Exit(0 if found.holds else 1)


async def _ask(url: str, key: str | None, timeout: float, settings: CheckSettings) -> Checked:
    try:
        import httpx

        from phasewise.check.run import check as run
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise UserError("check needs httpx, which is not installed: pip install 'phasewise[check]'") from error
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits) as http:
            return await run(http, settings, tell=lambda result: say(f"{result.law}: {result.verdict}"))
    except httpx.InvalidURL as error:
        raise UserError(f"{url} is no address ({error}): write http://HOST:PORT") from error


def _show(found: Checked) -> None:
    from phasewise.cli.show import table

    rows = [[r.law, r.verdict.upper(), f"{r.says}. {r.why}" if r.why else r.says] for r in found.results]
    by = f"compared by {found.compared}, seed {found.seed}"
    print(f"{found.model} at {found.url}: answers of {found.tokens} tokens, {by}")
    table(["law", "", "what must hold, and what came"], rows)
    counts = {verdict: sum(each.verdict == verdict for each in found.results) for verdict in ("pass", "fail", "skip")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
