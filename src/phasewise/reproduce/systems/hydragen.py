"""Hydragen: what requests have in common is read once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phasewise.bench.drive import Bench
from phasewise.bench.savers import PROMPTS_FIRST
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.limits import Limits
from phasewise.kv.format import Raw, entry_bytes
from phasewise.reproduce import batches, loads
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun, ask, play
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    KnobRatio,
    Load,
    Paper,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import PromptSource
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.traits import MARGIN

BATCH, OWN, PREFIX = 16, 32, 1024
WHOLE = 4  # requests that a fixed budget holds with a copy of the prefix each


def family(prefix: int, common: bool = True) -> Load:
    """Requests whose prompts begin alike, or, without anything in common, as long ones."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        length = asked.size(prefix, 128)
        shared = asked.code(length)
        beginnings = [shared if common else asked.code(length) for _ in range(BATCH)]
        return [
            LoadEntry(beginning + asked.piece(OWN), asked.size(64, 16), shared=length * common)
            for beginning in beginnings
        ]

    return load


def read(case: Case) -> int:
    """Bytes, in steps in which everybody decodes."""
    return sum(step.read for step in case.method.decoding)


def traffic(case: Case) -> int:
    """P + sum of what is each request's own, per step."""
    steps, shared = len(case.method.decoding), case.entries[0].shared
    return sum(shared + BATCH * (OWN + j) for j in range(1, steps + 1)) * case.row_bytes


def per_token(case: Case, run: PlayedRun) -> float:
    return run.work.kv_bytes_read / run.work.emitted


ON = Setting({"attend": "hydragen"}, prefix_cache=True)


def holders(requests: list[Request], rows: int) -> Iterator[list[Tensor]]:
    """Keys and values of the first rows of all layers: of the blocks that all have in common, and what each request
    has of them in its own slabs."""
    kvs = [request.kv for request in requests if request.kv is not None]
    common = set.intersection(*({id(node) for node in kv.nodes} for kv in kvs))
    nodes = [node for node in kvs[0].nodes if id(node) in common]
    yield [plane for node in nodes for planes in node.planes for plane in planes]
    for kv in kvs:
        slabs = [layer.slabs[0] for layer in kv.layers]
        yield [plane[:, : rows - slab.base] for slab in slabs for plane in slab.buffer.planes if slab.base < rows]


def held(lab: Lab, setting: Setting = ON) -> AttemptOutcome:
    """Bytes of the common rows while all decode, of tensors that lie apart."""
    entries = family(PREFIX)(lab.asked("pocket"))
    requests = [Request(entry.prompt, Params(max_tokens=64, ignore_eos=True)) for entry in entries]
    rows = entries[0].shared
    with lab.engine(setting, dtype="float32") as engine:
        ask(engine, {tuple(entries[0].prompt[:rows])})
        for request in requests:
            engine.add(request)
        while not all(request.n_out for request in requests):
            engine.step()
        lots = list(holders(requests, rows))
        apart = {(plane.data_ptr(), plane.shape): plane.numel() * plane.element_size() for lot in lots for plane in lot}
        for request in requests:
            engine.cancel(request)
    shapes = kv_shapes(lab.model("pocket", "float32"))
    once = rows * sum(entry_bytes(Raw(), shape) * shape.heads for shape in shapes)
    found = sum(apart.values())
    return AttemptOutcome(found == once, f"{found:,}, {found / once:g} times what one copy takes")


def at_once(lab: Lab, setting: Setting, common: bool = True) -> tuple[int, int]:
    """The most requests that decode in one step, within the KV bytes of WHOLE requests that share nothing; and how many
    would fit beside one copy of the prefix."""
    bench, entries = Bench(lab.model("pocket")), family(PREFIX, common)(lab.asked("pocket"))
    tokens, shared = len(entries[0].prompt) + entries[0].new, entries[0].shared
    runtime = batches.engine_of(bench, Setting(), 1 << 40, 1).recipes[""]
    budget = WHOLE * runtime.need(tokens + MARGIN)
    beside = (budget - shared * runtime.store.row_bytes) // runtime.need(tokens, shared)
    engine = bench.engine({**PROMPTS_FIRST, **setting.verbs}, Limits(kv_bytes=budget, max_running=BATCH))
    return max(step.streams for step in play(engine, entries).steps), min(beside, BATCH)


def fits(lab: Lab) -> AttemptOutcome:
    (ours, wanted), (theirs, _) = at_once(lab, ON), at_once(lab, Setting())
    return AttemptOutcome(ours == wanted > theirs, f"{ours} of {wanted}, where dense attention has {theirs}")


def fits_apart(lab: Lab) -> AttemptOutcome:
    (ours, _), (theirs, _) = at_once(lab, ON, common=False), at_once(lab, Setting(), common=False)
    return AttemptOutcome(ours == theirs < BATCH, f"{ours}, where dense attention has {theirs}")


SYSTEM = System(
    title="Hydragen",
    paper=Paper("Hydragen: High-Throughput LLM Inference with Shared Prefixes", "2402.05099"),
    claim="attention over a shared prefix is one matrix product for the whole batch, so that its KV is read once: up "
    "to 32 times the throughput of the best baseline; going from 1K to 16K shared tokens costs less than 15 %.",
    conditions=("CodeLlama-13B on eight A100", "large batches (up to 1,024) and long prefixes",
                "the shared part is stored once, which is what makes the batch large"),
    method=ON,
    baseline=Setting(prefix_cache=True),
    control=Setting(ON.verbs, prefix_cache=True, load=family(PREFIX, common=False)),
    control_is="the same method where prompts are as long and have nothing in common: there is nothing to save",
    line="a shared prefix is read once for the batch: up to 32 times the throughput",
    promises=("cost", "time"),
    load=family(PREFIX),
    exact=True,
    missing=("prefixes of 16K tokens, beyond the model's context",),
    counters=(
        Counter("KV bytes read while all decode", "P + sum of S rows per step, instead of B P + sum of S", read,
                traffic),
    ),
    arithmetic=(KnobRatio("KV bytes read per token", per_token),),
    attempts=(
        Attempt("counter", "KV bytes of the shared part while all decode", "P rows, however many requests hold them",
                held),
        Attempt("cost", f"requests that decode at once in the KV bytes of {WHOLE} whole ones",
                f"as many of {BATCH} as fit beside one copy of the prefix, more than dense attention has", fits),
        Attempt("control", "requests that decode at once where prompts have nothing in common",
                "as many as with dense attention", fits_apart, "cost"),
    ),
    timings=(
        Timing("time per token, all requests", 1.0, loads.per_token),
        Timing("time per token, prompts with nothing in common", 1.0, loads.per_token, against="control"),
    ),
)  # fmt: skip
