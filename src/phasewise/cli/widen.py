"""`phasewise widen`: makes a zero-padded twin of a model with a large model's cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.progress import working


def widen(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or pocket.")],
    out: Annotated[Path, typer.Option(help="Folder for the twin. It must be new or empty.")],
    factor: Annotated[int, typer.Option(min=2, max=8, help="Factor of the width. Weights grow by its square.")] = 4,
) -> None:
    """Write a zero-padded twin of a model that has the same tokens and a large model's cost.

    Use the twin to time methods at a larger size. The number of layers, the head size and the vocabulary stay. Hidden
    state, heads and feed-forward layers become --factor times as wide. No weight is rounded; logits differ only by the
    order of sums.

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
