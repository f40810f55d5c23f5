"""The options of `phasewise serve` for LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from phasewise import recipes
from phasewise.errors import UserError
from phasewise.serve.guard.policy import ServePolicy

PANEL = "LoRA adapters"


@dataclass(frozen=True)
class LoraOptions:
    """Adapters that are there from the start, where more may come from, and how many."""

    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="A LoRA adapter as PEFT saves it, for requests to the model NAME, or NAME@RECIPE. May be repeated, "
            "or a JSON list.",
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None
    lora_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Let clients load adapters from folders below DIR, and unload them (POST /v1/load_lora_adapter). "
            "Default: they may not.",
            rich_help_panel=PANEL,
        ),
    ] = None
    max_loras: Annotated[int, typer.Option(min=0, help="Most adapters at a time.", rich_help_panel=PANEL)] = 16
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest rank of one.", rich_help_panel=PANEL)] = 64

    def named(self) -> dict[str, str]:
        """{name: folder}. Raises UserError for what can be seen without reading an adapter."""
        found: dict[str, str] = {}
        for item in _items(self.lora or ()):
            name, equals, folder = item.partition("=")
            if not (equals and folder and recipes.NAME.fullmatch(name)):
                raise UserError(f"--lora {item}: write NAME=DIR, the name with letters, digits, '.', '_' and '-'")
            if name in found:
                raise UserError(f"--lora {item}: there are two adapters {name!r}: give each a name of its own")
            found[name] = folder
        if len(found) > self.max_loras:
            raise UserError(f"{len(found)} adapters are more than --max-loras {self.max_loras}: raise it")
        return found

    def refuse(self, why: str) -> None:
        """Raise UserError if anything is said of adapters."""
        if self.lora or self.lora_dir is not None:
            raise UserError(f"{why}: leave --lora and --lora-dir out")

    def within(self, policy: ServePolicy) -> ServePolicy:
        """The policy with where adapters may come from. Raises UserError."""
        if self.lora_dir is not None and not self.lora_dir.is_dir():
            raise UserError(f"--lora-dir {self.lora_dir}: there is no such folder")
        return replace(policy, lora_folder=self.lora_dir)


def _items(texts: Iterable[str]) -> list[str]:
    """Those of an option that may be a JSON list, as it is in a file. Raises UserError."""
    found: list[str] = []
    for text in texts:
        try:
            more = json.loads(text) if text.startswith("[") else [text]
        except ValueError:
            more = None
        if not isinstance(more, list) or not all(isinstance(each, str) for each in more):
            raise UserError(f'--lora {text}: give NAME=DIR, or a JSON list such as ["sql=adapters/sql"]')
        found += more
    return found
