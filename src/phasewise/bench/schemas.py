"""JSON Schemas with instances that others have judged (MaskBench): which are followed, and what that takes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from phasewise.bench.latency import percentile
from phasewise.bench.rounds import Ratio, order, ratio
from phasewise.errors import UserError
from phasewise.methods.sample._grammars import Compiled, compiled
from phasewise.methods.sample._words import Words
from phasewise.model.tokenizer import Tokenizer
from phasewise.request.params import Params
from phasewise.request.request import Request

if TYPE_CHECKING:
    from phasewise.verbs.place import Placed

ENDLESS = {
    "type": "array", "minItems": 4096, "items": {
        "type": "object", "properties": {"name": {"type": "string"}, "value": {"type": "integer"}},
        "required": ["name", "value"], "additionalProperties": False},
}  # fmt: skip  # no answer ends before it has its tokens


@dataclass(frozen=True)
class SchemaCase:
    """A schema, and instances of which is known whether they are valid."""

    name: str
    schema: Any
    tests: Sequence[tuple[Any, bool]]


@dataclass
class SchemaVerdict:
    """`right`: every instance is judged as it is marked; `wrong`: one is not; `refused`: the schema cannot be honoured,
    and `why`. Seconds of compiling it, and of each mask along the instances."""

    name: str
    how: Literal["right", "wrong", "refused"]
    why: str = ""
    compile: float = 0.0
    masks: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        p50, p99 = (percentile(self.masks, q) for q in (0.5, 0.99))
        return {"schema": self.name, "verdict": self.how, "why": self.why, "compile_s": self.compile,
                "masks": len(self.masks), "mask_p50_s": p50, "mask_p99_s": p99}  # fmt: skip


def read(path: Path) -> list[SchemaCase]:
    """One case per line: `name`, `schema` and `tests`, each with `data` and `valid`. Raises UserError."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [
            SchemaCase(str(row["name"]), row["schema"], [(t["data"], bool(t["valid"])) for t in row["tests"]])
            for row in lines
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no file of schemas with tests ({type(error).__name__}: {error})") from error


def judge(cases: Sequence[SchemaCase], tokenizer: Tokenizer, words: Words) -> Iterator[SchemaVerdict]:
    """Judges each schema. Raises UserError where llguidance is not installed."""
    theirs = words.tokenizer()
    for case in cases:
        began = time.perf_counter()
        try:
            grammar = compiled({"json_schema": case.schema}, theirs)
        except UserError as error:
            yield SchemaVerdict(case.name, "refused", str(error), time.perf_counter() - began)
            continue
        verdict = SchemaVerdict(case.name, "right", compile=time.perf_counter() - began)
        for data, valid in case.tests:
            ids = tokenizer.encode(json.dumps(data, ensure_ascii=False), add_special=False)
            if follows(grammar, ids, words, verdict.masks) != valid:
                verdict.how = "wrong"
                verdict.why = f"{'refuses' if valid else 'allows'} {json.dumps(data)[:80]}"
        yield verdict


def follows(grammar: Compiled, ids: Sequence[int], words: Words, seconds: list[float]) -> bool:
    """True if a grammar lets a model say these tokens and then end, mask by mask."""
    matcher = grammar.start()
    mask = np.zeros(words.width, dtype=np.int32)
    for token in [*ids, words.ends[0]]:
        began = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds.append(time.perf_counter() - began)
        if not mask[token >> 5] >> (token & 31) & 1:
            return False
        matcher.consume_token(token)
    return True


@dataclass(frozen=True)
class SchemaPace:
    """Answers that follow a schema beside free ones, all prompts at once: seconds of each round by contender, per token
    and per pass (the median of those that all requests shared), and the tokens that a pass gave each request."""

    token: dict[str, dict[int, float]]
    step: dict[str, dict[int, float]]
    tokens: dict[str, float]

    @property
    def per_token(self) -> Ratio | None:
        return ratio(self.token["schema"], self.token["free"])

    @property
    def per_pass(self) -> Ratio | None:
        return ratio(self.step["schema"], self.step["free"])


def pace(engine: Callable[[], Placed], prompts: Sequence[list[int]], new: int, rounds: int) -> SchemaPace:
    """Both take a turn in each round, in rotating order."""
    asked = {
        "schema": Params(max_tokens=new, ask={"json_schema": ENDLESS}),
        "free": Params(max_tokens=new, ignore_eos=True),
    }
    found = SchemaPace({name: {} for name in asked}, {name: {} for name in asked}, {})
    placed = engine()
    for number in range(-1, rounds):  # the first one warms up
        for name in order(list(asked), number):
            token, step, tokens = _timed(placed, [Request(prompt, asked[name]) for prompt in prompts])
            if number >= 0:
                found.token[name][number], found.step[name][number], found.tokens[name] = token, step, tokens
    return found


def _timed(placed: Placed, requests: Sequence[Request]) -> tuple[float, float, float]:
    """-> seconds per token, seconds per pass, and tokens per pass, of a request."""
    for request in requests:
        placed.add(request)
    shared, count = list[float](), 0
    with torch.inference_mode():
        while any(request.left is None for request in requests):
            before = [request.n_out for request in requests]
            began = time.perf_counter()
            placed.step()
            if all(before) and all(request.left is None for request in requests):
                shared.append(time.perf_counter() - began)
                count += sum(request.n_out for request in requests) - sum(before)
    wrong = next((r for r in requests if r.left is not None and r.left.reason != "length"), None)
    assert wrong is None, f"an answer ended early: {wrong}"
    each = [tpot for request in requests if (tpot := request.trace.tpot) is not None]
    if not shared:
        raise UserError(f"no pass was shared by all {len(requests)} requests: ask for more tokens of each (--new)")
    return sum(each) / len(each), statistics.median(shared), count / len(shared) / len(requests)
