"""`--config FILE`: the options of a command, and recipes, from a TOML file. What the command line says wins.

model = "path/to/model"
port = 8011
kv-bytes = "2G"
schedule = "sarathi:budget=256"

[recipes.fast]
draft = "prompt_lookup:k=6"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from phasewise import recipes
from phasewise.errors import UserError, near
from phasewise.serve.guard.policy import Reread

TABLE = "recipes"
HERE = ("config", "help", "recipe")  # options that a file cannot set


def load(context: typer.Context, path: Path | None) -> Path | None:
    """A callback for the option itself, eager: what the file says becomes the default of the command's options."""
    if path is not None:
        given = read(path)
        given.pop(TABLE, None)
        known = {parameter.name: parameter for parameter in context.command.params if parameter.name}
        choices = known.keys() - set(HERE)
        defaults = {}
        for key, value in given.items():
            name = key.replace("-", "_")
            if name not in choices:
                there = near(key, {*(choice.replace("_", "-") for choice in choices), TABLE})
                raise UserError(f"{path}: unknown option {key!r}. {there}")
            if known[name].multiple:  # an option that may be repeated
                value = [value] if isinstance(value, str) else value
                if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                    raise UserError(f"{path}: {key} = {value!r} must be text, or a list of texts")
            elif not isinstance(value, (str, int, float)):
                raise UserError(f"{path}: {key} = {value!r} is not a value of an option: write text, a number or true")
            defaults[name] = value
        context.default_map = {**(context.default_map or {}), **defaults}
    return path


class OptionsFile:
    """A server's file of options, to be read again; `given`: recipes of the command line, which win."""

    def __init__(self, path: Path, given: Mapping[str, Mapping[str, str]]) -> None:
        self._path, self._given = path, given
        self._first = read(path)

    def __call__(self) -> Reread:
        """Raises UserError."""
        now = read(self._path)
        every = sorted({*now, *self._first} - {TABLE})
        changed = [name for name in every if now.get(name) != self._first.get(name)]
        return Reread({**recipes_of(self._path), **self._given}, changed)


def recipes_of(path: Path | None) -> dict[str, dict[str, str]]:
    """The file's recipes: {name: {verb: method}}. Raises UserError naming the file."""
    table = {} if path is None else read(path).get(TABLE, {})
    if not isinstance(table, Mapping) or not all(isinstance(verbs, Mapping) for verbs in table.values()):
        raise UserError(f'{path}: {TABLE} must be tables: write [{TABLE}.fast], and below it draft = "prompt_lookup"')
    for name, verbs in table.items():
        for verb, text in verbs.items():
            if not isinstance(text, str):
                raise UserError(f'{path}: {verb} = {text!r} of recipe {name!r} must be text, as in {verb} = "..."')
    try:
        recipes.check(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return {name: dict(verbs) for name, verbs in table.items()}


def read(path: Path) -> dict[str, Any]:
    """What a TOML file says. Raises UserError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
