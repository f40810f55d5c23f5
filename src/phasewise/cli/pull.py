"""`phasewise pull`: a model of the Hugging Face hub, downloaded ahead of its first use."""

from __future__ import annotations

from typing import Annotated

import typer

from phasewise.cli.progress import say
from phasewise.known.models import every


def pull(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="A hub id, or a name of `phasewise models`.")],
    file: Annotated[
        str | None, typer.Option(metavar="NAME.gguf", help="Take this GGUF file of a repository that has several.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Take this branch, tag or commit. Default: main.")
    ] = None,
) -> None:
    """Download a model from the Hugging Face hub, and print its path.

    Only safetensors or one GGUF file are taken, with tokenizer and settings;
    never pickled weights. Files that are here whole are not downloaded again,
    and a connection that breaks goes on where it stopped. Files lie in the
    hub's own cache (HF_HOME moves it); HF_ENDPOINT names another hub.

    [bold]Examples[/]

      phasewise pull Qwen/Qwen2.5-0.5B-Instruct
      phasewise pull Qwen/Qwen2.5-0.5B-Instruct-GGUF --file qwen2.5-0.5b-instruct-q8_0.gguf
      phasewise run "$(phasewise pull HuggingFaceTB/SmolLM2-135M-Instruct)"
    """
    if name in every():
        from phasewise.load import model_path

        print(model_path(name, say=say))
        return
    from phasewise.model.hub import pull as pulled

    say(f"pulling {name}")
    print(pulled(name, file=file, revision=revision))
