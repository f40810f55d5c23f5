"""Contenders over HTTP: how they are named, who takes turns when, what the table says of numbers made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phasewise.bench.latency import ServedRequest
from phasewise.bench.load import LoadResult, measure
from phasewise.bench.rivals import Contest, Rival, rivals
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError
from phasewise.request.trace import Trace
from tests.bench.test_load import Served as Server
from tests.bench.test_load import at

A, B = "http://a:1", "http://b:2"


def shots(number: int) -> list[Shot]:
    return [Shot(0.0, [5, 6, 7 + number + 1], 4) for _ in range(2)]


def answered(ttft: float, tpot: float, error: str | None = None) -> ServedRequest:
    trace = Trace(0.0)
    for i in range(4):
        trace.emitted(ttft + i * tpot, 1)
    return ServedRequest(trace, 3, error)


def test_contenders_are_recipes_or_servers() -> None:
    assert Rival.parse("default") == Rival("default")
    assert Rival.parse("draft=prompt_lookup:k=6 store=int8").verbs == {"draft": "prompt_lookup:k=6", "store": "int8"}
    assert Rival.parse("http://h:80/") == Rival("h:80/", "http://h:80")
    assert Rival.parse("theirs=https://h:80") == Rival("theirs", "https://h:80")


@pytest.mark.parametrize(
    ("texts", "says"),
    [(["default"], "is only one contender"), (["default", "default"], "is named twice"),
     (["default", "draf=x"], "unknown verb"),
     (["default", "fast"], "not a setting")],
)  # fmt: skip
def test_mistakes_are_named(texts: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        rivals(texts)


def test_rounds_are_interleaved_and_ratios_paired() -> None:
    """B takes half as long in every round, though rounds differ tenfold."""
    asked: list[tuple[str, int, int]] = []

    def timed(url: str, each: Sequence[Shot]) -> LoadResult:
        asked.append((url, each[0].prompt[2] - 8, each[0].new))
        slow = (10.0 if each[0].prompt[2] == 9 else 1.0) * (1.0 if url == A else 0.5)
        return LoadResult("m", [answered(0.2 * slow, 0.01 * slow) for _ in each], slow, 0.0)

    run = Contest({"a": A, "b": B}, timed)
    assert list(run.run(3, shots)) == [1, 2, 3, 4, 5, 6]
    assert asked == [(A, -1, 4), (B, -1, 4), (A, 0, 4), (B, 0, 4), (B, 1, 4), (A, 1, 4), (A, 2, 4), (B, 2, 4)]
    header, (first, second) = run.table()
    assert header[0] == "" and first[0] == "a" and first[-3:] == ["1", "1", "1"]
    assert second == ["b", "16", "100 ms", "100 ms", "5 ms", "5 ms", "0", *["2.00 [2.00, 2.00]"] * 3]


def test_failures_are_counted_and_a_dead_server_ends_it() -> None:
    def timed(url: str, each: Sequence[Shot]) -> LoadResult:
        wrong = "HTTP 503: full" if url == B else None
        return LoadResult(
            "m", [answered(0.1, 0.01, wrong if i or len(each) == 1 else None) for i in range(len(each))], 1.0, 0.0
        )

    run = Contest({"a": A, "b": B}, timed)
    assert list(run.run(1, shots)) == [1, 2] and (run.failed("a"), run.failed("b")) == (0, 1)
    assert run.table()[1][1][-1] == "1.00", "of one round there is no interval"
    with pytest.raises(UserError, match="b answered none of 1 requests: HTTP 503: full"):
        list(Contest({"a": A, "b": B}, timed).run(1, lambda number: shots(number)[:1]))


@pytest.mark.thorough
def test_real_servers() -> None:
    with at(Server(wait=0.0)) as fast, at(Server(wait=0.2)) as slow:
        run = Contest({"slow": slow, "fast": fast}, lambda url, each: measure(url, each, lambda done: None))
        assert list(run.run(3, shots)) == [1, 2, 3, 4, 5, 6]
    assert {row["served_model"] for row in run.rows} == {"little"} and run.failed("slow") + run.failed("fast") == 0
    for number in range(3):
        assert run.values("slow", "ttft_p50_s")[number] >= 0.2
