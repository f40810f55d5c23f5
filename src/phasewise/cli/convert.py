"""`phasewise convert`: makes checkpoints from others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Make a checkpoint from another one.")


@app.callback()
def convert() -> None:
    """Make a checkpoint from another one."""


@app.command("kv_heads")
def kv_heads(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or pocket.")],
    heads: Annotated[int, typer.Option(min=1, help="Number of KV heads in the result; must divide the model's own.")],
    out: Annotated[Path, typer.Option(help="Folder for the result. It must be new or empty.")],
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of recovery training, a million or more; 0: no training.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training texts.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the recovery training in --out with its own settings.")
    ] = False,
) -> None:
    """Merge a model's KV heads along the directions that their caches use (arXiv 2406.07056), for less KV.

    The result is an ordinary checkpoint. The directions are measured on library source and generated tasks. With
    --tokens the result is then trained on these to recover what it lost. Plain Llamas with tied embeddings, such as
    pocket, can be trained.

    [bold]Examples[/]

      phasewise convert kv_heads pocket --heads 1 --out runs/pocket-1kv
      phasewise convert kv_heads pocket --heads 1 --out runs/pocket-1kv --tokens 1500000
      phasewise eval recall@1k code --model runs/pocket-1kv
    """
    from phasewise.cli.progress import counting
    from phasewise.train.kv_heads import KVHeadsJob
    from phasewise.train.kv_heads import convert as make

    job = KVHeadsJob(model, heads, out, tokens, seed, resume)
    if resume and not (job.aside / "checkpoint.pt").is_file():
        raise UserError(f"there is nothing to resume: {job.aside / 'checkpoint.pt'} does not exist; leave --resume out")
    if resume and not tokens:
        raise UserError("--resume continues a recovery: say how long it is in all, --tokens")
    made = make(job, counting)
    print(f"{made}\nUse it with --model {made}")


@app.command("heads")
def heads(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="medusa_lm_head.pt, hydra_lm_head.pt, pytorch_model.bin (EAGLE), or the folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the result. It must be new or empty.")],
    target: Annotated[
        str | None,
        typer.Option("--for", metavar="MODEL", help="Their model; needed where heads have no output matrices."),
    ] = None,
) -> None:
    """Make a folder of heads, in safetensors, from Medusa's, Hydra's or EAGLE's own file.

    Of a pickled file nothing but tensors is read. The server itself never opens one.

    [bold]Examples[/]

      phasewise convert heads medusa_lm_head.pt runs/medusa
      phasewise convert heads hydra_lm_head.pt runs/hydra --for ./vicuna-7b
      phasewise serve --model ./vicuna-7b --draft medusa:heads=runs/medusa
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT={out} must be new or empty")
    from phasewise.load import config_of
    from phasewise.speculation.heads.pickled import convert as make

    drafter = make(source, out, None if target is None else config_of(target).vocab)
    print(f"{out}\nUse it with --draft {drafter}:heads={out}")
