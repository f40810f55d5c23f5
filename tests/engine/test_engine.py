"""The engine under random load: nothing is lost, nothing leaks, nobody's tokens depend on anybody else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phasewise.engine.invariants import check
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import double, tiny
from tests.engine.engines import method_options, same
from tests.laws import axes

SLAB = 64 * tiny.engine().store.row_bytes
SCHEDULES = ("sarathi:budget=1", "sarathi:budget=9", "sarathi", "prefill_first", "layered:rows_per_group=7")


@dataclass(frozen=True)
class Arrival:
    """One request of a random workload."""

    prompt: int  # rows
    new: int
    step: int
    temperature: float = 0.0
    siblings: int = 0
    cancelled: int | None = None  # steps after its arrival
    head: bool = False  # begins like others do
    stop: int | None = None  # a token that ends it

    @property
    def params(self) -> Params:
        stop = () if self.stop is None else (self.stop,)
        return Params(self.new, self.temperature, seed=self.prompt, stop_tokens=stop, ignore_eos=True)

    @property
    def tokens(self) -> list[int]:
        (own,) = tiny.prompts(self.prompt, seed=self.prompt)
        return tiny.prompts(70)[0] + own if self.head else own


arrivals = st.builds(
    Arrival,
    prompt=st.integers(1, 90),
    new=st.integers(1, 12),
    step=st.integers(0, 25),
    temperature=st.sampled_from((0.0, 1.0)),
    siblings=st.integers(0, 2),
    cancelled=st.none() | st.integers(0, 20),
    head=st.booleans(),
    stop=st.none() | st.integers(3, 20),
)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=7),
    st.sampled_from(SCHEDULES),
    st.integers(5, 14),
    st.integers(1, 5),
    st.booleans(),
)
def test_random_load(load: list[Arrival], schedule: str, slabs: int, max_running: int, prefix_cache: bool) -> None:
    run_load({"schedule": schedule}, load, kv_bytes=slabs * SLAB, max_running=max_running, prefix_cache=prefix_cache)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=5),
    st.sampled_from(SCHEDULES),
    st.sampled_from(
        [options | {"verify": "match"} for options in method_options("draft")] + method_options("evict", "store")
    ),
    st.sampled_from(method_options("attend", "skip")),
    st.integers(9, 14),
)
def test_random_load_of_methods(
    load: list[Arrival], schedule: str, first: dict[str, str], second: dict[str, str], slabs: int
) -> None:
    """Drafts, blocks, evicted and quantised rows, pages and skipped layers in pairs: interruptions change nothing."""
    assume(axes.allowed(axes.Choice(tuple(first.items())), axes.Choice(tuple(second.items()))))
    with pytest.MonkeyPatch.context() as patch:
        rounds = "store" in first  # to levels, which in single precision hangs on the last bit of a sum
        if rounds:
            double.everything(patch)
        options = first | second | {"schedule": schedule}
        runtime = tiny.engine(options).parts.recipes[""]  # type: ignore[attr-defined]
        longest = max((request.limit for arrival in load for request in _family(arrival)), default=0)
        alone = runtime.need(longest + runtime.margin)  # what no budget may be below, or the request is refused
        run_load(options, load, kv_bytes=max(slabs * SLAB * (1 + rounds), alone))


def run_load(options: dict[str, str], load: list[Arrival], **limits: int) -> None:
    engine = tiny.engine(options, **limits)
    methods = tuple((verb, text) for verb, text in options.items() if verb != "schedule")
    families = [_family(arrival) for arrival in load]
    for now in range(2000):
        for arrival, family in zip(load, families):
            if arrival.step == now:
                for request in family:
                    engine.add(request)
            if arrival.cancelled is not None and arrival.step + arrival.cancelled == now:
                engine.cancel(family[0])
            check(engine)
        progressed = engine.step()
        check(engine)
        assert len(engine.running) <= engine.parts.max_running
        assert len(set(map(id, progressed))) == len(progressed)
        if now > 60 and all(r.left for family in families for r in family):
            break
    for arrival, family in zip(load, families):
        for request in family:
            assert request.left is not None, "lost"
            assert request.left.how in ("finished", "cancelled"), request.left.reason
            assert same(request, _full(arrival, request, methods)), (
                f"{request.out} != {_full(arrival, request, methods)}"
            )
    engine.forget_prefixes()
    assert engine.idle and engine.kv_bytes == 0


def _family(arrival: Arrival) -> list[Request]:
    parent = Request(arrival.tokens, arrival.params)
    return [parent, *(parent.sibling(i + 1) for i in range(arrival.siblings))]


@cache
def _tokens(arrival: Arrival, seed: int, options: tuple[tuple[str, str], ...]) -> list[int]:
    params = Params(arrival.new, arrival.temperature, seed=seed, ignore_eos=True)
    placed = tiny.engine(dict(options) | {"schedule": "prefill_first"}, prefix_cache=False)
    return tiny.outs(tiny.run(placed, [arrival.tokens], params))[0]


def _full(arrival: Arrival, request: Request, options: tuple[tuple[str, str], ...] = ()) -> list[int]:
    """The tokens of an uninterrupted run with these methods, up to its stop token."""
    tokens = _tokens(arrival, request.params.seed, options)
    stops = [i for i, token in enumerate(tokens) if token == arrival.stop]
    return tokens[: stops[0] + 1] if stops else tokens
