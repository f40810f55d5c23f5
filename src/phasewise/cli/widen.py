"""`phasewise widen`: a model's twin at a large model's cost, for the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.progress import working


def widen(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or pocket.")],
    out: Annotated[Path, typer.Option(help="Folder for the twin; new, or empty.")],
    factor: Annotated[int, typer.Option(min=2, max=8, help="How many times as wide: weights grow by its square.")] = 4,
) -> None:
    """Write a zero-padded twin of a model: the same tokens, a large model's cost.

    For timing what a small model decides. Layers, heads' size and vocabulary stay; hidden state, heads and feed-forward
    become so many times as wide. No weight is rounded; logits are the same but for the order in which sums are made.

    [bold]Examples[/]

      phasewise widen pocket --factor 8 --out runs/pocket-x8
      phasewise widen pocket-draft --factor 8 --out runs/draft-x8
      phasewise bench offline --model runs/pocket-x8 --draft draft_model:model=runs/draft-x8
    """
    from phasewise.load import files_of
    from phasewise.model.source import copy_vocabulary
    from phasewise.model.widen import widen as write

    files = files_of(model)
    with working(f"widening {model}"):
        total = write(files, out, factor)
        copy_vocabulary(files, out)
    print(f"{out}\n{total / 1e6:,.1f} MB of weights. Use it with --model {out}")
