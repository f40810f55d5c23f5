"""Lives from events: phases follow one another without a gap, whatever order and detours the events tell of."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from phasewise.report.lives import DECODE, HANDOFF, PREFILL, STAGES, WAITING, recording, shares

HELLO = {"event": "hello", "version": 1, "scope": "all", "kv_limit_bytes": 1 << 20}


def step(at: float, lanes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    numbers = {"waiting": 0, "running": 1, "kv_bytes": 2048, "prefix_bytes": 1024}
    return {"event": "step", "at": at, **numbers, "lanes": lanes or []}


def stage(number: int, what: str, at: float, worker: str = "engine") -> dict[str, Any]:
    more: dict[str, Any] = {"worker": worker}
    if what == "queued":
        more = {"prompt_tokens": 9, "recipe": "fast"}
    if what == "left":
        more |= {"how": "finished", "reason": "length", "output_tokens": 4}
    return {"event": "request", "number": number, "what": what, "at": at, **more}


def life(*stages: tuple[str, float]) -> Any:
    told = recording([HELLO, *(stage(1, what, at) for what, at in stages), step(10.0)])
    assert told is not None
    return told.lives[0]


@pytest.mark.parametrize(
    ("stages", "spans"),
    [
        ([("queued", 0), ("admitted", 1), ("first_token", 3), ("left", 6)],
         [(WAITING, 0, 1), (PREFILL, 1, 3), (DECODE, 3, 6)]),
        ([("queued", 0), ("admitted", 1), ("first_token", 3), ("sent", 4), ("owned", 5), ("left", 6)],
         [(WAITING, 0, 1), (PREFILL, 1, 3), (DECODE, 3, 4), (HANDOFF, 4, 5), (DECODE, 5, 6)]),
        ([("queued", 0), ("admitted", 1), ("sent", 2), ("first_token", 3), ("owned", 5), ("left", 6)],
         [(WAITING, 0, 1), (PREFILL, 1, 2), (HANDOFF, 2, 5), (DECODE, 5, 6)]),
        ([("queued", 0), ("admitted", 1), ("first_token", 2), ("preempted", 4), ("resumed", 7), ("left", 9)],
         [(WAITING, 0, 1), (PREFILL, 1, 2), (DECODE, 2, 4), (WAITING, 4, 7), (DECODE, 7, 9)]),
        ([("queued", 0), ("left", 3)], [(WAITING, 0, 3)]),
        ([("queued", 0), ("admitted", 1)], [(WAITING, 0, 1), (PREFILL, 1, 10)]),
    ],
)  # fmt: skip
def test_phases_follow_from_stages(stages: list[tuple[str, float]], spans: list[tuple[str, float, float]]) -> None:
    for order in (stages, stages[::-1]):
        assert [span[:3] for span in life(*order).spans(10.0)] == spans
    assert all(before[2] == after[1] for before, after in pairwise(spans))


def test_every_phase_has_its_worker() -> None:
    """Also where pieces of the KV set out before the prompt is done, and where nobody was told of."""
    by = {"admitted": "p", "first_token": "p", "sent": "p", "owned": "d", "left": "d"}
    for order in ("queued admitted first_token sent owned left", "queued admitted sent first_token owned left"):
        events = [stage(1, what, float(at), by.get(what, "")) for at, what in enumerate(order.split())]
        told = recording([HELLO, *events, step(9.0)])
        assert told is not None and told.workers == ["d", "p"]
        spans = told.lives[0].spans(told.end)
        assert {(span.phase, span.worker) for span in spans} <= {(WAITING, ""), (PREFILL, "p"), (HANDOFF, "p"),
                                                                (DECODE, "p"), (DECODE, "d")}  # fmt: skip
        assert (spans[-1].phase, spans[-1].worker, spans[-1].end) == (DECODE, "d", 5.0)
        old = recording([HELLO, *({**event, "worker": ""} for event in events), step(9.0)])
        assert old is not None and old.workers == []
        assert [span.phase for span in old.lives[0].spans(9.0)] == [span.phase for span in spans]


def test_what_makes_way_is_with_nobody() -> None:
    one = life(("queued", 0), ("admitted", 1), ("first_token", 2), ("preempted", 4), ("resumed", 7), ("left", 9))
    assert [span.worker for span in one.spans(10.0)] == ["", "engine", "engine", "", "engine"]


def test_the_five_stages_add_up() -> None:
    whole = [("queued", 0), ("admitted", 1), ("first_token", 3), ("sent", 3.5), ("owned", 5), ("left", 9)]
    one = life(*whole)
    assert one.parts() == dict(zip(STAGES, (1, 2, 0.5, 1.5, 4)))
    assert life(*whole[:3], whole[-1]).parts() is None, "it was not handed over"
    assert life(*whole, ("preempted", 6), ("resumed", 7)).parts() is None, "it took a detour"
    assert shares([one, life(("queued", 0), ("left", 2))]) == {stage: [value] for stage, value in one.parts().items()}
    assert shares([]) == {}


def test_what_is_told_besides() -> None:
    lane = {"worker": "prefill-0", "prefill": 7, "decode": 0, "steps": 1, "drafted": 0, "accepted": 0, "forced": 0}
    told = recording([HELLO, stage(4, "queued", 2.0), step(1.5, [lane]), {"event": "dropped", "count": 3}, step(6.0)])
    assert told is not None
    assert (told.kv_limit, told.dropped, told.start, told.end, told.workers) == (1 << 20, 3, 1.5, 6.0, ["prefill-0"])
    assert (told.work[0].at, told.work[0].prefill, told.lives[0].prompt_tokens) == (1.5, 7, 9)
    assert recording([HELLO]) is None and recording([]) is None
