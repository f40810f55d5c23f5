"""`phasewise datastore`: indexes texts in a model's tokens for drafters that search them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.progress import counting, working
from phasewise.errors import UserError


def datastore(
    out: Annotated[Path, typer.Argument(help="Folder for the datastore. It must be new or empty.")],
    folder: Annotated[
        Path | None, typer.Option(help="Index the text files below this folder. Default: Python's own library.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A model with the tokenizer to use: a name, a directory or a hub id.")
    ] = "pocket",
) -> None:
    """Make a datastore for --draft retrieval and aded: texts in a model's tokens, sorted for search.

    All UTF-8 text files of the folder are indexed, except hidden ones. The datastore serves every model with this
    tokenizer.

    [bold]Examples[/]

      phasewise datastore runs/mine --folder src
      phasewise run "import os" --draft retrieval:store=runs/mine
    """
    from phasewise.known.corpus import sources
    from phasewise.load import files_of
    from phasewise.methods.draft._datastore import encoded, vocabulary

    texts = list(sources(held_out=False).values()) if folder is None else _texts(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there and not an empty folder: name a new one")
    files = files_of(model)
    with counting("tokens", len(texts)) as done:
        made = encoded(files, texts, done)
    with working("writing"):
        made.save(out, vocabulary(files), "Python's library" if folder is None else str(folder))
    print(f"{out}\n{len(made.tokens):,} tokens of {len(texts):,} texts. Use it with --draft retrieval:store={out}")


def _texts(folder: Path) -> list[str]:
    """The texts of the files below a folder, in the order of their names."""
    if not folder.is_dir():
        raise UserError(f"--folder {folder}: there is no such folder")
    texts = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text and "\0" not in text:
            texts.append(text)
    if not texts:
        raise UserError(f"--folder {folder}: there is no text in it: a datastore needs files in UTF-8")
    return texts
