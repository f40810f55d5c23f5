"""Step times as others measured them on GPUs: the tables of `aiconfigurator-core`, operation by operation.

The package is asked of what a model's sizes say, never of a name: nothing is fetched, and no weights are needed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from phasewise.errors import UserError, near
from phasewise.plan.cost import Price, StepWork
from phasewise.plan.device import device
from phasewise.plan.shape import DecoderShape

PREFIX = "aiconfigurator:"
INSTALL = "pip install 'phasewise[plan]'"
BACKENDS = ("sglang", "trtllm", "vllm")
PRICED = {"h100_sxm": "h100", "h200_sxm": "h200", "a100_sxm": "a100"}  # whose price a device file knows
LARGEST = 8192  # rows of a step for which the package keeps memory free of KV
LAST = 1 << 20  # context of the models described to it
BITS = 6  # of a context's mean and a slice's length that count: at most a part 1/64 is rounded away


class Tables(Protocol):
    """Seconds of the parts of a step on one kind of GPU, all that share the model at once."""

    kv_tokens: int

    def rest(self, rows: int, prompts: bool) -> float:
        """All but attention, of so many rows."""
        ...

    def read(self, slices: int, rows: int, before: int) -> float:
        """Attention of slices of prompts, each of so many rows after so many that are there."""
        ...

    def write(self, requests: int, context: int) -> float:
        """Attention of decodes, each of which sees so many rows."""
        ...


@dataclass(frozen=True)
class Place:
    """A set of tables: a kind of GPU under another engine, of some version ("": the package's own choice)."""

    system: str
    backend: str
    version: str = ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse aiconfigurator:SYSTEM/BACKEND[/VERSION]. Raises UserError."""
        parts = text.removeprefix(PREFIX).split("/")
        if not 2 <= len(parts) <= 3 or not all(parts):
            raise UserError(f"device {text!r}: write {PREFIX}SYSTEM/BACKEND or {PREFIX}SYSTEM/BACKEND/VERSION, "
                            f"such as {PREFIX}h100_sxm/trtllm")  # fmt: skip
        return cls(*parts)

    def __str__(self) -> str:
        return PREFIX + "/".join(filter(None, (self.system, self.backend, self.version)))


@dataclass(frozen=True)
class TableCost:
    """A model on `ways` GPUs that share every layer; `price` is of all of them together. Tables are asked once for
    each size: rows as they are, contexts rounded to `BITS` bits. They say nothing of energy: joules are 0."""

    tables: Tables
    shape: DecoderShape
    ways: int = 1
    hourly: float = 0.0
    _rest: Callable[[int, bool], float] = field(init=False, repr=False, compare=False)
    _read: Callable[[int, int, int], float] = field(init=False, repr=False, compare=False)
    _write: Callable[[int, int], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rest", "read", "write"):
            object.__setattr__(self, f"_{name}", cache(getattr(self.tables, name)))

    @property
    def kv_bytes(self) -> float:
        """KV memory of all devices together, bytes."""
        return self.tables.kv_tokens * self.shape.row_bytes

    def price(self, step: StepWork) -> Price:
        seconds = self.seconds(step)
        return Price(seconds, 0.0, self.hourly / 3600 * seconds * self.ways)

    def seconds(self, step: StepWork) -> float:
        rows = round(step.rows)
        if rows < 1:
            return 0.0
        seconds = self._rest(rows, step.prefill_rows > 0)
        if step.prefill_rows > 0:
            count, length, before = slices_of(step)
            slices = max(1, round(count))
            seconds += count / slices * self._read(slices, max(1, round(length)), rounded(round(before)))
        if step.decode_rows:
            seconds += self._write(step.decode_rows, max(1, rounded(step.context // step.decode_rows)))
        return seconds * step.share


def rounded(count: int) -> int:
    """Round to `BITS` bits, so that one size stands for its neighbours."""
    unit = 1 << max(0, count.bit_length() - BITS)
    return (count + unit // 2) // unit * unit


def slices_of(step: StepWork) -> tuple[float, float, float]:
    """(slices, rows of each, rows before each) of equal slices with the same rows, pairs and rows that they read.

    Of b slices of s rows after p: rows = b s, prefixes = b (p + s), pairs = b (p s + s (s + 1) / 2).
    """
    rows = float(step.prefill_rows)
    before = max(0.0, step.prefixes - rows)
    count = rows * (before + rows / 2) / max(1e-9, step.pairs - rows / 2)
    count = max(1.0, min(count, rows))
    return count, rows / count, before / count


# ---- the package
def table_cost(place: Place, shape: DecoderShape, ways: int) -> TableCost:
    """Costs of a model's steps from measured tables. Raises UserError for what they do not have."""
    try:
        import aiconfigurator_core
    except ImportError as error:
        raise UserError(f"{place} needs measured tables, which are not installed ({error}): {INSTALL}") from error
    version = check(place, Path(aiconfigurator_core.__file__).parent / "systems")
    if (shape.width, shape.kv_width) != (2.0, 2.0):
        raise UserError(f"{place}: the tables are of 16-bit weights and KV, not of {8 * shape.width:g} and "
                        f"{8 * shape.kv_width:g} bits")  # fmt: skip
    known = PRICED.get(place.system)
    return TableCost(Core(place, version, shape, ways), shape, ways, device(known).price if known else 0.0)


def check(place: Place, systems: Path) -> str:
    """The version that is meant. Raises UserError naming what was not measured, and what is near it."""
    from aiconfigurator_core.sdk.perf_database import get_version_slots

    names = [path.stem for path in systems.glob("*.yaml") if (systems / "data" / path.stem).is_dir()]
    if place.system not in names:
        raise UserError(f"{place}: unknown system {place.system!r}. {near(place.system, names)}")
    if place.backend not in BACKENDS:
        raise UserError(f"{place}: unknown backend {place.backend!r}. {near(place.backend, BACKENDS)}")
    slots = get_version_slots(place.system, place.backend)
    if not slots:
        raise UserError(f"{place}: nothing was measured on {place.system} under {place.backend}. Take another backend, "
                        "or a device file")  # fmt: skip
    if place.version and place.version not in (*slots, *slots.values()):
        raise UserError(f"{place}: unknown version {place.version!r}. {near(place.version, slots.values())}")
    return str(slots.get(place.version, place.version) or slots["current"])


def described(shape: DecoderShape) -> dict[str, Any]:
    """The config.json of a decoder of these sizes, as the package reads it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": LAST,
        "torch_dtype": "bfloat16",
    }
    if shape.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.chosen,
            "moe_intermediate_size": shape.intermediate,
        }
    return config


class Core:
    """The tables of `aiconfigurator-core` for one model. Its attention is one operation of many; what it takes is asked
    for apart, so that any mixture of prompts and decodes has a price."""

    def __init__(self, place: Place, version: str, shape: DecoderShape, ways: int) -> None:
        from aiconfigurator_core.sdk.engine import EngineHandle

        self._what = f"{place}, ways={ways}"
        split: dict[str, Any] = {"tp_size": ways, "moe_tp_size": ways} if shape.experts else {"tp_size": ways}
        log = logging.getLogger("aiconfigurator_core")
        level = log.level
        log.setLevel(logging.ERROR)  # it warns of attention kernels that TensorRT-LLM does not choose among
        try:
            with TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(described(shape)), encoding="utf-8")
                engine: Any = EngineHandle.compile(
                    folder, place.system, place.backend, backend_version=version, **split
                )
                self._engine = engine
                first, later = engine.run_static_per_op(batch_size=1, isl=64, osl=2)
                self.kv_tokens = _kv_tokens(folder, place, version, split)
        except Exception as error:  # of the package, in classes of many kinds
            raise UserError(f"{self._what}: this model has no price there: {_said(error)}. Try other ways, another "
                            "system, or a device file") from error  # fmt: skip
        finally:
            log.setLevel(level)
        self._prompts = _parts([one[0] for one in first])
        self._decodes = _parts([one[0] for one in later])

    def rest(self, rows: int, prompts: bool) -> float:
        if prompts:
            return self._ask(self._engine.evaluate_context_ops, self._prompts[0], batch_size=1, s=rows)
        return self._ask(self._engine.evaluate_generation_ops, self._decodes[0], batch_size=rows, s=1)

    def read(self, slices: int, rows: int, before: int) -> float:
        return self._ask(self._engine.evaluate_context_ops, self._prompts[1], batch_size=slices, s=rows, prefix=before)

    def write(self, requests: int, context: int) -> float:
        return self._ask(self._engine.evaluate_generation_ops, self._decodes[1], batch_size=requests, s=context)

    def _ask(self, evaluate: Callable[..., Any], which: list[int], **sizes: int) -> float:
        try:
            return float(sum(milliseconds for _, milliseconds, _, _ in evaluate(which, **sizes))) / 1e3
        except Exception as error:  # of the package, in classes of many kinds
            raise UserError(f"{self._what}: no measurements at {sizes}: {_said(error)}") from error


def _parts(names: list[str]) -> tuple[list[int], list[int]]:
    """Returns the indices of all operations but attention, and those of attention."""
    attention = [i for i, name in enumerate(names) if name.endswith("_attention")]
    assert attention, f"no attention among {names}"
    return [i for i in range(len(names)) if i not in attention], attention


def _kv_tokens(folder: str, place: Place, version: str, split: dict[str, Any]) -> int:
    """Returns the tokens that fit into the KV memory of such an engine, at its default share."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    backend: Any = get_backend(place.backend)
    found = estimate_kv_cache(
        folder, place.system, place.backend, version, max_num_tokens=LARGEST, max_batch_size=1,
        memory_fraction_kind="of_free" if backend.memory_fraction_of_free() else "of_total",
        memory_fraction_value=float(backend.get_default_free_gpu_memory_fraction(version)), **split,
    )  # fmt: skip
    return int(found["total_kv_size_tokens"])


def _said(error: BaseException) -> str:
    """The first sentence of an error, and its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
