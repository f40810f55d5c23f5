"""Quantised checkpoints that somebody spoilt: each loads, or is refused by name, and takes no memory before that."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.model.nm import PATTERNS
from phasewise.ops import native
from tests.memory import forget, peak
from tests.model import test_nm, test_quantised, test_quantised_tables

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
SEEDS, ROUNDS = range(4), 12
EXTREMES = [0, 1, -1, 2, 7, 3, 31, 33, 1 << 15, 1 << 31, 1 << 40, (1 << 63) - 1]
OTHERS: list[Any] = [None, "", "all", [], {}, True, -1, 0, 1.5, 7, 1 << 40, [64], {"a": 1}]
DTYPES = ["F32", "F16", "BF16", "I8", "U8", "I32", "I64", "U32", "F8_E4M3", "F64", "BOOL", "Q4", 7]
MEGABYTES = 50.0


def every() -> dict[str, Callable[[Path], object]]:
    """Whole checkpoints of every layout."""
    ours = {name: (lambda path, case=case: test_quantised.write(case, path))
            for name, case in test_quantised.CASES.items()}  # fmt: skip
    tables = {name: (lambda path, case=case: test_quantised_tables.write(case, path))
              for name, case in test_quantised_tables.CASES.items()}  # fmt: skip
    sparse = {f"nm {pattern}": (lambda path, pattern=pattern: test_nm.write_sparse("llama", path, pattern))
              for pattern in PATTERNS}  # fmt: skip
    return {**ours, **tables, **sparse}


WHOLE = every()


class Spoiler:
    """Changes to the files of a checkpoint, drawn with a seed."""

    def __init__(self, path: Path, seed: int) -> None:
        self.draw, self.path = random.Random(seed), path
        self.raw = (path / "model.safetensors").read_bytes()
        self.config = json.loads((path / "config.json").read_text())
        size = struct.unpack("<Q", self.raw[:8])[0]
        self.header, self.data = json.loads(self.raw[8 : 8 + size]), self.raw[8 + size :]

    def spoil(self) -> str:
        """Write other files; returns what was done."""
        kind = self.draw.choice(["bytes", "cut", "shape", "dtype", "offsets", "without", "renamed", "numbers", "said"])
        header, data, config = json.loads(json.dumps(self.header)), self.data, json.loads(json.dumps(self.config))
        name = self.draw.choice([each for each in header if each != "__metadata__" and "layers.1" in each])
        entry = header[name]
        if kind == "bytes":
            spoilt = bytearray(self.raw)
            for _ in range(self.draw.randint(1, 8)):
                spoilt[self.draw.randrange(min(len(spoilt), 9000))] = self.draw.randrange(256)
            return self._write(bytes(spoilt), config, kind)
        if kind == "cut":
            return self._write(self.raw[: self.draw.randrange(len(self.raw))], config, kind)
        if kind == "shape":
            shape = entry["shape"] or [1]
            shape[self.draw.randrange(len(shape))] = self.draw.choice(EXTREMES)
            entry["shape"] = self.draw.choice([shape, shape[::-1], [*shape, 1], shape[:-1]])
        elif kind == "dtype":
            entry["dtype"] = self.draw.choice(DTYPES)
        elif kind == "offsets":
            entry["data_offsets"][self.draw.randrange(2)] = self.draw.choice(EXTREMES)
        elif kind == "without":
            return self._tensors({each: value for each, value in header.items() if each != name}, data, config, kind)
        elif kind == "renamed":
            header[name + self.draw.choice(["_", ".weight", "s"])] = header.pop(name)
        elif kind == "numbers":
            start, end = entry["data_offsets"]
            spoilt = bytearray(data)
            spoilt[start:end] = bytes(self.draw.randrange(256) for _ in range(min(end - start, 64))).ljust(
                end - start, bytes([self.draw.choice([0, 127, 255])]))  # fmt: skip
            data = bytes(spoilt)
        else:
            self._say_otherwise(config)
        return self._tensors(header, data, config, f"{kind} of {name}")

    def _say_otherwise(self, config: dict[str, Any]) -> None:
        """Another value somewhere in the settings of quantisation."""
        at = config["quantization"] if "quantization" in config else config["quantization_config"]
        while True:
            key = self.draw.choice(list(at))
            if not isinstance(at[key], dict) or not at[key] or self.draw.random() < 0.2:
                at[key] = self.draw.choice(OTHERS)
                return
            at = at[key]

    def _tensors(self, header: dict[str, Any], data: bytes, config: dict[str, Any], what: str) -> str:
        said = json.dumps(header).encode()
        return self._write(struct.pack("<Q", len(said)) + said + data, config, what)

    def _write(self, raw: bytes, config: dict[str, Any], what: str) -> str:
        (self.path / "model.safetensors").write_bytes(raw)
        (self.path / "config.json").write_text(json.dumps(config))
        return what


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_spoilt_is_read_or_refused(name: str, tmp_path: Path) -> None:
    WHOLE[name](tmp_path)
    refused = 0
    for seed in SEEDS:
        spoiler = Spoiler(tmp_path, seed)
        for _ in range(ROUNDS):
            what = spoiler.spoil()
            known = forget()
            before = peak() if known else 0.0
            try:
                Model.load(tmp_path)
            except UserError as error:
                refused += 1
                assert len(str(error)) < 2000, what
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
            assert not known or peak() - before < MEGABYTES, what
        spoiler._write(spoiler.raw, spoiler.config, "")
    assert refused > len(SEEDS) * ROUNDS // 4
    assert torch.isfinite(Model.load(tmp_path).norm.weight).all()
