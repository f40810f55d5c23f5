"""JSON files of a checkpoint as read, with lookups that name the file and the key that is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasewise.errors import UserError

MOST = {
    "num_hidden_layers": 10_000, "head_dim": 1 << 16, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16,
    "num_local_experts": 1 << 16, "num_experts": 1 << 16,
}  # fmt: skip
"""Beyond these, far from any model, tables are made before the weights can show that a file is wrong."""


class RawConfig:
    """`config.json` as read, with lookups that say what is missing; a JSON null counts as missing."""

    def __init__(self, values: Mapping[str, Any], path: Path | str = "config.json") -> None:
        self.values = values
        self.path = path

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; UserError when it is missing without a default, or is something else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UserError(f"{self.path}: {key!r} must be a positive whole number, got {value!r}.")
        if value > MOST.get(key, value):
            raise UserError(f"{self.path}: {key!r} is {value}, more than any model has ({MOST[key]:,} at most).")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{self.path}: {key!r} must be a finite number, got {value!r}.")
        return float(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """A nested object, empty when missing."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: {key!r} must be an object, got {value!r}.")
        return dict(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError naming the file when it holds anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). Download or export the checkpoint again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(values).__name__}.")
    return values
