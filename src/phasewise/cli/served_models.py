"""`serve --models FILE|DIR`: the models of a server, from a file of them or from a folder that holds them.

[fast]                              # the name for clients
model = "smollm2"                   # a known name, a path (from the file's folder on, too) or a hub id
pinned = true                       # loaded at the start, and never unloaded
draft = "prompt_lookup:k=6"         # options of `phasewise serve`, over those of the command line

[large]
model = "path/to/model.gguf"
kv-bytes = "2G"
sleep-after = 300                   # seconds without requests after which it is unloaded
preload = true                      # loaded at the start

[large.recipes.long]                # large@long
evict = "streaming"

[large.loras]                       # the model sql: large with this adapter
sql = "adapters/sql"
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise import recipes
from phasewise.cli.options import DRAFTER, EngineOptions
from phasewise.errors import UserError, near
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.tools.formats import check

if TYPE_CHECKING:
    from phasewise.request.params import SLO
    from phasewise.serve.registry.slot import ModelEntry

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*")  # '@' stands before a recipe
ENGINE = {field.name: field for field in dataclasses.fields(EngineOptions)}
FORMATS = ("tool_format", "reasoning_format", "generation_config")
RECIPES, LORAS = "recipes", "loras"
KINDS = {"pinned": bool, "preload": bool, "sleep_after": (int, float), RECIPES: Mapping, LORAS: Mapping}
KNOWN = (*ENGINE, *FORMATS, *KINDS)
SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
FIRST = re.compile(r"-00001-of-\d{5}$")


@dataclass(frozen=True)
class SharedOptions:
    """What the command line says for all models: options, recipes, the server's policy, and how many adapters a model
    may have, of which rank."""

    engine: EngineOptions
    recipes: Mapping[str, Mapping[str, str]]
    policy: ServePolicy
    slo: SLO
    max_loras: int
    max_lora_rank: int


def entries(path: Path, common: SharedOptions) -> list[ModelEntry]:
    """The models of a file, or of a folder. Raises UserError naming what is wrong with it."""
    if path.is_dir():
        return [_entry(name, {"model": str(where)}, common, path) for name, where in folder(path).items()]
    said = read(path)
    try:
        return [_entry(name, given, common, path.parent) for name, given in said.items()]
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def folder(path: Path) -> dict[str, Path]:
    """The models in a folder, by name: its sub-folders with config.json or a .gguf file, and its .gguf files."""
    found: dict[str, Path] = {}
    for each in sorted(path.iterdir()):
        if each.is_dir():
            if (each / "config.json").is_file() or next(each.glob("*.gguf"), None) is not None:
                found[each.name] = each
        elif each.suffix.lower() == ".gguf" and not each.name.startswith("mmproj") and not SHARD.search(each.stem):
            found.setdefault(FIRST.sub("", each.stem), each)
    if not found:
        raise UserError(f"{path} holds no model: neither folders with config.json nor .gguf files")
    return found


def read(path: Path) -> dict[str, Any]:
    """What a file of models says, by its ending: TOML, YAML or JSON. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
        said = _parsed(text, path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # of all three formats, and of text that is none
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(said, Mapping) or not said:
        raise UserError(f"{path} names no models: write tables, each with model = ..., or a name and a path")
    return {str(name): given for name, given in said.items()}


def _parsed(text: str, path: Path) -> Any:
    """Raises ValueError."""
    kind = path.suffix.lower()
    if kind == ".json":
        return json.loads(text)
    if kind == ".toml":
        return tomllib.loads(text)
    if kind not in (".yaml", ".yml"):
        raise ValueError("its name must end in .toml, .yaml, .yml or .json")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError("YAML needs PyYAML (pip install pyyaml); TOML and JSON need nothing") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _entry(name: str, given: Any, common: SharedOptions, at: Path) -> ModelEntry:
    from phasewise.load import weight_bytes
    from phasewise.serve.registry.slot import ModelEntry

    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name for a model: use letters, digits and '. _ - / :'")
    options = {key.replace("-", "_"): value for key, value in _table(name, given).items()}
    _check(name, options)
    engine = dataclasses.replace(common.engine, **{key: value for key, value in options.items() if key in ENGINE})
    engine = dataclasses.replace(engine, model=_found(options["model"], at))
    if not engine.speaks_of_drafts:
        engine = dataclasses.replace(engine, draft=DRAFTER)
    named = {**common.recipes, **_recipes(name, options.get(RECIPES, {}))}
    loras = _loras(name, options.get(LORAS, {}), at, common.max_loras)
    most = {"max_loras": common.max_loras, "max_lora_rank": common.max_lora_rank}
    engine.check(named)
    limits = engine.limits()
    formats = {key: value for key, value in options.items() if key in FORMATS}
    policy = dataclasses.replace(common.policy, **formats, sleep_after=None)
    check(policy.tool_format, policy.reasoning_format)
    return ModelEntry(
        name, lambda: engine.llm(named, loras, **most),
        lambda: weight_bytes(engine.model, engine.dtype, engine.weights),
        limits.budget + limits.kv_host, tuple(named), tuple(loras), limits.kv_disk, bool(options.get("pinned")),
        bool(options.get("preload")), options.get("sleep_after", common.policy.sleep_after), policy, common.slo,
    )  # fmt: skip


def _table(name: str, given: Any) -> dict[str, Any]:
    """The options of one model, of which only a path may be given."""
    if isinstance(given, str):
        return {"model": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("model"), str) or not given["model"]:
        raise UserError(f'model {name!r} must be a path or a table with model = "...", not {given!r}')
    return dict(given)


def _check(name: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for an option that is unknown, or of another kind than it has to be."""
    for key, value in options.items():
        if key not in KNOWN:
            there = near(key.replace("_", "-"), [each.replace("_", "-") for each in KNOWN])
            raise UserError(f"model {name!r} has an unknown option {key.replace('_', '-')!r}. {there}")
        default = ENGINE[key].default if key in ENGINE else None
        kind: Any = KINDS.get(key, type(default) if isinstance(default, (bool, int)) else str)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"model {name!r}: {key.replace('_', '-')} = {value!r} is not a value of this option")
    if options.get("sleep_after", 1) <= 0:
        raise UserError(f"model {name!r}: sleep-after = {options['sleep_after']} must be more than 0 seconds")


def _recipes(name: str, table: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    for recipe, verbs in table.items():
        if not isinstance(verbs, Mapping) or not all(isinstance(text, str) for text in verbs.values()):
            raise UserError(f'model {name!r}: recipe {recipe!r} must be a table of methods, as in draft = "paced"')
    recipes.check(table)
    return {recipe: dict(verbs) for recipe, verbs in table.items()}


def _loras(name: str, table: Mapping[str, Any], at: Path, most: int) -> dict[str, str]:
    """The adapters of a model, {name: folder}. They are read when the model is loaded."""
    for lora, path in table.items():
        if not isinstance(path, str) or not path:
            raise UserError(
                f'model {name!r}: adapter {lora!r} must be the path of a folder, as in sql = "adapters/sql"'
            )
        if not recipes.NAME.fullmatch(lora):
            raise UserError(f"model {name!r}: adapter {lora!r} is no name: take letters, digits, '.', '_' and '-'")
        if not Path(_found(path, at)).is_dir():
            raise UserError(f"model {name!r}: adapter {lora!r}: there is no folder {path}")
    if len(table) > most:
        raise UserError(f"model {name!r}: {len(table)} adapters are more than --max-loras {most}: raise it")
    return {lora: _found(path, at) for lora, path in table.items()}


def _found(model: str, at: Path) -> str:
    """A path from the file's folder on, if there is one; else what was written."""
    beside = at / Path(model).expanduser()
    return str(beside) if beside.exists() else model
