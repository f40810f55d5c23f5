"""One seeded trace per method, and the record of what it gave: tokens, counters and KV bytes.

A case is a set of verb options. Its trace runs in one engine whose prompts are computed by one worker and decoded by
another, both in this process. It holds greedy and sampled requests of the case beside requests of other recipes, slices
of prompts, a fork, a cancellation, a preemption and a prefix hit. `scripts/golden.py` writes the record.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.load import load_model, model_path
from phasewise.model.model import Model
from phasewise.model.tokenizer import Tokenizer
from phasewise.ops import native
from phasewise.options import DEFAULTS, parse, parse_recipes
from phasewise.recipes import ENGINE_WIDE
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests.laws.compare import TIE, Recording
from tests.laws.engines import engines, preempt
from tests.laws.settings import options, spell, tight

FILE = Path(__file__).parents[1] / "golden" / "golden.json.gz"
PLACE, SCHEDULE = "disaggregated:local=24", "sarathi:budget=40"  # prompts of up to 24 tokens are decoded where they are
TEXT = (
    "The old clock in the hall stopped at noon. Nobody in the house had noticed that the old clock in the hall had "
    "stopped, for everybody was looking for the dog. The dog was asleep in the hall, under the old clock, and it was "
    "dreaming of a long road by the sea. When the clock did not strike one, the dog woke up and looked at the clock."
)
MATES = {
    "fast": {"draft": "prompt_lookup:k=3", "verify": "match"},
    "window": {"evict": "streaming:sinks=2,window=30"},
}  # recipes of requests that share the steps
CANCELLED, PREEMPTED, AGAIN = 3, 5, 6  # the steps before which these things happen
N = 6  # tokens of a request
NEAR = 1e-2  # gaps of the two best logits that are recorded
CODED = 10_000


# ---- cases
def cases() -> dict[str, dict[str, str]]:
    """{name: verb options} of every method, every part of one in its host, and every wrapper over what it may hold."""
    found = {f"{verb}.{name}": options(verb, name) for verb, name, _ in catalog.every()}
    for verb, name, cls in catalog.every():
        for held, part in catalog.parts_of(cls).items():
            if held in catalog.slots_of(cls):
                continue
            for other in catalog.names(part.kind):
                if (held, other) != ("then", DEFAULTS.get(part.kind)):
                    found[f"{verb}.{name}:{held}={other}"] = holding(verb, name, held, part.kind, other)
    return found


def holding(verb: str, name: str, held: str, kind: str, other: str) -> dict[str, str]:
    """Options at which the field `held` of a method holds another method at its tight knobs."""
    knobs = dict(getattr(catalog.method(kind, other), "tight", {}))
    inner = spell(kind, other, knobs)
    given = options(verb, name, tight(verb, name) | {held: f"({inner})"})
    if kind == "decode" and catalog.slots_of(catalog.method(kind, other)):
        given["draft"] = spell("draft", "draft_model", {"k": 3})
    return given


def traces(names: Collection[str], day: int, lacking: Collection[str] | None = None) -> list[tuple[str, str, bool]]:
    """Name, dtype, and whether the quick tier compares the trace on this day.

    It compares every method in bfloat16 each day. A third of them follows in float32, which costs three times as much,
    and a third of the wrappers over what they hold in bfloat16. `lacking`: names whose record has no bfloat16 of this
    machine's kernels, which are looked up if they are not said; methods among them are compared in float32 each day.
    """
    if lacking is None:
        lacking = {name for name, entry in read().items() if kernels() not in entry["bfloat16"]}
    single, wrapped = ([name for name in names if (":" in name) == held] for held in (False, True))
    often = {(name, "bfloat16") for name in single} | {(name, "bfloat16") for name in wrapped[day % 3 :: 3]}
    often |= {(name, "float32") for name in {*single[day % 3 :: 3], *(name for name in single if name in lacking)}}
    return [(name, dtype, (name, dtype) in often) for name in names for dtype in ("float32", "bfloat16")]


def naming(name: str) -> list[str]:
    """The cases of a name: itself or, of a method, those in which it holds another one or is held as well."""
    short = name.rpartition(".")[2]
    return [case for case in cases() if case.partition(":")[0] == name or case.endswith(f"={short}") or case == name]


# ---- the trace
@dataclass
class Clock:
    """Seconds by the work done, so that what is decided by the clock is decided alike on every machine."""

    placed: Placed | None = None

    def __call__(self) -> float:
        if self.placed is None:
            return 0.0
        work = [engine.counters for engine in engines(self.placed)]
        return sum(1e-3 * each.forwards + 2e-4 * each.draft_forwards + 5e-5 * each.rows for each in work)


@cache
def model(name: str, dtype: str) -> Model:
    return load_model(name, dtype=getattr(torch, dtype))


@cache
def tokens_of_text() -> list[int]:
    return Tokenizer.load(model_path("pocket")).encode(TEXT, add_special=False)


def requests() -> tuple[list[Request], Request]:
    """Those that arrive at once, and one that arrives when its beginning is cached."""
    text = tokens_of_text()

    def greedy(name: str, prompt: list[int], recipe: str = "mine") -> Request:
        return Request(prompt, Params(N, ignore_eos=True), id=name, recipe=recipe)

    def sampled(name: str, prompt: list[int], recipe: str = "mine") -> Request:
        return Request(prompt, Params(N, temperature=0.9, seed=7, ignore_eos=True), id=name, recipe=recipe)

    family = sampled("forked", text[20:40])
    first = [
        greedy("moved", text[:70]), family, family.sibling(1), sampled("mate sampled", text[:30], "window"),
        greedy("mate", text[40:62], "fast"), greedy("cancelled", text[5:45]),
    ]  # fmt: skip
    return first, sampled("again", text[:72])


def build(verbs: Mapping[str, str], dtype: str, ties: dict[tuple[str, int], float] | None = None) -> Placed:
    """The placement of a case; `ties` is filled with the gap of the two best logits by request and position. Raises
    UserError for what cannot work together."""
    wide = {verb: text for verb, text in verbs.items() if verb in ENGINE_WIDE}
    own = {verb: text for verb, text in verbs.items() if verb not in wide} or {"decode": DEFAULTS["decode"]}
    base = {"place": PLACE, "schedule": SCHEDULE} | wide
    recipes = parse_recipes(base, {"mine": own, **MATES})
    if ties is not None:
        for methods in recipes.values():
            methods["sample"] = Recording(methods["sample"], ties)
    clock = Clock()
    placed = Builder(
        model("pocket", dtype), parse(base), Limits(kv_bytes=64 << 20), load=lambda name: model("pocket-draft", dtype),
        clock=clock, recipes=recipes,
    ).build()  # fmt: skip
    clock.placed = placed
    for engine in engines(placed):
        for runtime in engine.recipes.values():
            for phase in runtime.phases:
                _use(clock, phase.decode)
    return placed


def _use(clock: Clock, held: Any) -> None:
    """Let the runtime of a decode method, and whatever it holds, read this clock."""
    if hasattr(held, "clock"):
        held.clock = clock
    for inner in ("then", "drafter", "of", "base", "source"):
        if hasattr(held, inner):
            _use(clock, getattr(held, inner))


def trace(verbs: Mapping[str, str], dtype: str, ties: dict[tuple[str, int], float] | None = None) -> dict[str, Any]:
    """What the trace of a case gives: tokens and ends of its requests, counters, and KV bytes held after each step. A
    case that is refused gives only that."""
    try:
        placed = build(verbs, dtype, ties)
    except UserError:
        return {"refused": True}
    every, last = requests()
    held: list[int] = []

    def step() -> None:
        placed.step()
        held.append(sum(engine.kv_bytes for engine in engines(placed)))

    for request in every:
        placed.add(request)
    while not placed.idle or len(held) <= AGAIN:
        if len(held) == CANCELLED:
            placed.cancel(every[-1])
        if len(held) == PREEMPTED:
            preempt(placed, lambda i, request: i > 0)
        if len(held) == AGAIN:
            every.append(last)
            placed.add(last)
        step()
    counters = {name: n for name, n in placed.counters.as_dict().items() if n}
    placed.forget_prefixes()
    step()
    placed.close()
    return {
        "tokens": {request.id: request.out for request in every},
        "left": {request.id: f"{request.left.how}: {request.left.reason}" for request in every if request.left},
        "counters": counters,
        "kv_bytes": held,
    }


def near_ties(verbs: Mapping[str, str], dtype: str) -> dict[str, dict[str, float]]:
    """{request: {index of an output token: gap}} where the two best logits of a case differ by less than `NEAR`."""
    gaps: dict[tuple[str, int], float] = {}
    trace(verbs, dtype, gaps)
    first, last = requests()
    found: dict[str, dict[str, float]] = {}
    for request in (*first, last):
        for index in range(N):
            gap = gaps.get((request.id, request.prompt_len + index), NEAR)
            if request.params.greedy and gap < NEAR:
                found.setdefault(request.id, {})[str(index)] = round(gap, 7)
    return found


# ---- the record
def kernels() -> str:
    """The instruction set of the kernels that this process runs, or "none"."""
    library = native.library()
    return "none" if library is None else Path(library._name).stem.removeprefix("_")


def read() -> dict[str, Any]:
    """{case: {"verbs", "float32", "ties", "bfloat16": {kernels: trace}}}"""
    return json.loads(gzip.decompress(FILE.read_bytes()))  # type: ignore[no-any-return]


def write(record: Mapping[str, Any]) -> None:
    """The same bytes for the same record."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def differences(
    got: Mapping[str, Any], want: Mapping[str, Any], ties: Mapping[str, Any], coded: bool = False
) -> tuple[list[str], list[str]]:
    """What differs from the record, and the near ties at which tokens parted; after one, nothing else is compared.

    `coded`: bytes are those of KV coded to its entropy, so a number that another machine rounds to its other neighbour
    changes them; they may differ by one in `CODED`.
    """

    def same(bytes_now: int, before: int) -> bool:
        return bytes_now == before or (coded and abs(bytes_now - before) * CODED <= before)

    if got.get("refused") or want.get("refused"):
        return ([] if got == want else [f"refused: {got.get('refused', False)}, was {want.get('refused', False)}"]), []
    wrong, parted = [], []
    for name, were in want["tokens"].items():
        if (are := got["tokens"][name]) == were:
            continue
        at = _first(are, were)
        if ties.get(name, {}).get(str(at), TIE) < TIE:
            parted.append(f"{name}: token {at}, by a gap of {ties[name][str(at)]:.1e}")
        else:
            wrong.append(f"{name}: token {at}: {are} instead of {were}")
    if not wrong and not parted:
        for name in sorted(want["counters"].keys() | got["counters"].keys()):
            n, before = (side["counters"].get(name, 0) for side in (got, want))
            equal = same(n, before) if "bytes" in name else n == before
            wrong += [] if equal else [f"counter {name}: {n} instead of {before}"]
        for name, how in want["left"].items():
            wrong += [f"{name}: {got['left'][name]}, was {how}"] * (got["left"][name] != how)
        if len(got["kv_bytes"]) != len(want["kv_bytes"]) or not all(map(same, got["kv_bytes"], want["kv_bytes"])):
            at = _first(got["kv_bytes"], want["kv_bytes"])
            wrong.append(f"KV bytes after step {at}: {got['kv_bytes']} instead of {want['kv_bytes']}")
    return wrong, parted


def _first(a: Sequence[int], b: Sequence[int]) -> int:
    """The first index at which two lists differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def check(entry: Mapping[str, Any], verbs: Mapping[str, str], dtype: str) -> tuple[list[str], list[str], str]:
    """What differs from a case's entry, the near ties at which its tokens parted, or why it cannot be compared."""
    if entry["verbs"] != verbs:
        return [f"its options are {verbs}, and were {entry['verbs']}"], [], ""
    want = entry[dtype] if dtype == "float32" else entry[dtype].get(kernels())
    if want is None:
        return [], [], f"the record has no bfloat16 for kernels {kernels()!r}"
    ties = entry["ties"] if dtype == "float32" else {}
    return *differences(trace(verbs, dtype), want, ties, "cachegen" in verbs.get("store", "")), ""
