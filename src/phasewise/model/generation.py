"""Sampling that a model's authors recommend: generation_config.json, read as vLLM reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasewise.errors import UserError
from phasewise.model.raw import read_json

FILE = "generation_config.json"
LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "top_k": (-1, 1 << 30), "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3), "max_new_tokens": (1, 1 << 30),
}  # fmt: skip
WHOLE = ("top_k", "max_new_tokens")


def recommended(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The values that a request takes where it says nothing, by the names that generation_config.json has for them.

    `do_sample` decides nothing. UserError for a value that is no number or out of range.
    """
    found = {name: values[name] for name in LIMITS if values.get(name) is not None}
    for name, value in found.items():
        low, high = LIMITS[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or (name in WHOLE and value != int(value)):
            kind = "whole number" if name in WHOLE else "number"
            raise UserError(f"{path}: {name} is {value!r}, but it must be a {kind} in [{low:g}, {high:g}]. Correct it, "
                            "or serve with --generation-config none.")  # fmt: skip
    return {name: int(value) if name in WHOLE else float(value) for name, value in found.items()}


def read(path: Path) -> dict[str, Any]:
    """Returns what a file, or a folder's generation_config.json, recommends. Raises UserError where there is none."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--generation-config {path}: there is no such file. Say auto, none, or give a file, or a "
                        f"folder that holds {FILE}.")  # fmt: skip
    return recommended(read_json(file), file)
