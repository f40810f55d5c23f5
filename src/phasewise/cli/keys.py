"""`phasewise keys`: API keys for `phasewise serve --keys`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def keys() -> None:
    """API keys for `phasewise serve --keys FILE`, a TOML file with a table per key:

    \\[keys.alice]
    sha256 = "..."                   # hash of the key; a list while an old key is still in use
    requests_per_minute = 60
    tokens_per_minute = 100000       # prompt and output together
    concurrent = 4                   # requests at once
    max_tokens = 1024                # of one answer
    max_prompt = 4096                # tokens
    max_n = 4                        # answers of one request
    timeout = 60                     # seconds that a request may take
    models = \\["smollm2@fast"]       # names as /v1/models lists them; without it, all
    metrics = true                   # may read /metrics

    Only sha256 is required. SIGHUP makes a running server reload the file.

    [bold]Examples[/]

      phasewise keys new alice
      phasewise serve --keys keys.toml
    """


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, as logs and metrics show it.")],
) -> None:
    """Make a key, show it once, and print the lines for the file of --keys, which hold only its hash.

    [bold]Examples[/]

      phasewise keys new alice
    """
    from phasewise.serve.guard.keys import check_name, new_key

    check_name(name)
    secret, digest = new_key()
    table = f'"{name}"' if "." in name else name
    print(f"Key (it is shown only once): {secret}\n")
    print(f'Add these lines to the file of --keys:\n\n[keys.{table}]\nsha256 = "{digest}"')
