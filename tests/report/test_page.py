"""The page: whole, valid, without anything from outside, and with what the files hold."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from phasewise.bench.goodput import GoodputPoint, Target
from phasewise.bench.latency import ServedRequest, summary
from phasewise.bench.recording import stamps
from phasewise.errors import UserError
from phasewise.report.gantt import GanttBar, packed, stays
from phasewise.report.lives import LifeSpan
from phasewise.report.page import page
from phasewise.report.runs import read
from phasewise.request.params import SLO
from phasewise.request.trace import Trace
from tests.report.test_lives import HELLO, stage, step

MACHINE = {"cpu": "a <processor>", "cores": 2, "torch": "2"}
VOID = {"meta", "link", "br", "use", "path"}


def served(count: int, at_once: int = 1) -> list[ServedRequest]:
    found = []
    for number in range(count):
        trace = Trace(0.1 * number)
        for i in range(5):
            trace.emitted(0.1 * number + 0.2 + 0.01 * i, at_once if i else 1)
        found.append(ServedRequest(trace, 9, None))
    return found


def load(path: Path, at_once: int = 1, events: bool = True, answers: list[ServedRequest] | None = None) -> Path:
    """As `bench load --record` writes it."""
    answers = answers or served(6, at_once)
    command = f"phasewise bench load --record {path.name} '<b>'"
    row = {
        "bench": "load",
        "command": command,
        "model": "m",
        "machine": MACHINE,
        "counters": {"output_tokens": 30.0, "forwards": 15.0},
        **summary(answers, 1.0, SLO(0.5, 0.1)),
    }
    rows: list[dict[str, Any]] = [row, *stamps(answers, 0.0)]
    if events:
        lane = {"worker": "decode-0", "prefill": 2, "decode": 5, "steps": 1, "drafted": 0, "accepted": 0, "forced": 0}
        rows.append(HELLO)
        for number in range(3):
            names = ("queued", "admitted", "first_token", "sent", "owned", "left")
            by = ["", "prefill-0", "prefill-0", "prefill-0", "decode-0", "decode-0"]
            rows += [stage(number, what, number + 0.1 * i, by[i]) for i, what in enumerate(names)]
            rows.append(step(number + 0.3, [lane]))
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def goodput(path: Path) -> Path:
    targets = [Target.parse("tight=500/60")]
    rows = [
        {"bench": "goodput", "command": "phasewise bench goodput", "model": "m", "machine": MACHINE,
         **GoodputPoint("a", rate, served(4)).row(targets), "targets": {"tight": "here"}}
        for rate in (1.0, 2.0)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


class Checker(HTMLParser):
    """Tags closed in order, ids once, nothing fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.refers: set[str] = set()
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                assert value not in self.ids, value
                self.ids.add(value or "")
            if name in ("href", "xlink:href", "src"):
                assert value and value.startswith("#"), f"{tag} fetches {value}"
                self.refers.add(value[1:])
            assert not name.startswith("on"), "no scripts"
        assert tag not in ("script", "iframe", "img")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def check(text: str) -> list[str]:
    """-> the headings."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == [] and checker.refers <= checker.ids
    refers = set(re.findall(r"url\(#([^)]+)\)", text))
    assert refers and refers <= checker.ids
    assert not re.search(r"@import|url\((?!#)", text)
    return checker.titles


def test_everything_is_there_with_its_command(tmp_path: Path) -> None:
    files = [load(tmp_path / "one.jsonl"), load(tmp_path / "two.jsonl", at_once=3), goodput(tmp_path / "g.jsonl")]
    text = page("A <title>", read(files))
    titles = check(text)
    each = ("Both phases, request by request: {}", "The hand-off in five stages: {}", "KV bytes and the queue: {}",
            "{}: what the server counted")  # fmt: skip
    assert {words.format(name) for words in each for name in ("one", "two")} <= set(titles)
    assert {"What load meets the targets", "Who waited how long", "Tokens a pass"} <= set(titles)
    assert "A &lt;title&gt;" in text and "a &lt;processor&gt;" in text and "<b>" not in text
    assert text.count("<pre>") >= text.count("<section>") == len(titles)
    assert "phasewise bench load --record two.jsonl" in text and "0.5" in text  # forwards per output token


def test_every_bar_stands_with_its_request_and_with_its_worker(tmp_path: Path) -> None:
    text = page("t", read([load(tmp_path / "one.jsonl")]))
    bars = re.findall(r"<title>request (\d+): ([a-z-]+)(?:, ([a-z]+-0))?, 100 ms</title>", text)
    for number in "012":
        each = [(phase, by) for found, phase, by in bars if found == number]
        alone = [("waiting", "")]
        shared = [("prefill", "prefill-0"), ("decode", "prefill-0"), ("hand-off", "prefill-0"), ("decode", "decode-0")]
        assert sorted(each) == sorted(alone + 2 * shared)
    assert text.count(">prefill-0,<") == text.count(">decode-0,<") == 1, "each worker has a panel"


def test_stays_are_packed_without_overlap() -> None:
    def bar(number: int, nth: int, start: float, end: float, worker: str) -> GanttBar:
        return GanttBar(number, nth, LifeSpan("decode", start, end, worker))

    one = [bar(1, 0, 0, 2, "a"), bar(1, 1, 2, 3, "a"), bar(1, 2, 3, 4, "b"), bar(1, 3, 4, 6, "a")]
    two, three = [bar(2, 0, 1, 5, "a")], [bar(3, 0, 5, 6, "a")]
    found = stays([one, two, three], "a")
    assert found == [one[:2], two, one[3:], three]
    assert packed(found) == [[one[:2], one[3:]], [two, three]]
    assert stays([one, two], "b") == [one[2:3]] and packed([]) == []


def test_a_load_without_events_shows_what_the_client_saw(tmp_path: Path) -> None:
    titles = check(page("t", read([load(tmp_path / "one.jsonl", events=False)])))
    assert "Who waited how long" in titles and not any("phases" in title for title in titles)
    assert "Tokens a pass" not in titles, "one token at a time says nothing"


def test_answers_that_came_at_once_have_no_gaps(tmp_path: Path) -> None:
    """As a client sees them that is slower than the server."""
    answers = [ServedRequest(Trace(0.1 * number), 9, None) for number in range(3)]
    for number, one in enumerate(answers):
        one.trace.emitted(0.1 * number + 0.2, 6)
    text = page("t", read([load(tmp_path / "one.jsonl", answers=answers)]))
    titles = check(text)
    assert "Who waited how long" in titles and "Tokens a pass" not in titles, "nothing came after a first emission"


@pytest.mark.filterwarnings("error")
def test_a_load_of_which_everything_failed_still_has_its_page(tmp_path: Path) -> None:
    answers = [ServedRequest(Trace(0.1 * number), 9, "HTTP 500") for number in range(3)]
    text = page("t", read([load(tmp_path / "one.jsonl", answers=answers)]))
    assert "Who waited how long" in check(text) and "3 requests, 3 failed" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "line 1, is no JSON"), ('{"a": 1}', "of no benchmark"), ("", "no results"), ("[]", "of no benchmark"),
     ('{"event": "hello"}', "no results")],
)  # fmt: skip
def test_files_of_another_kind_are_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(UserError, match=says):
        read([tmp_path / "x.jsonl"])
    with pytest.raises(UserError, match="cannot be read"):
        read([tmp_path / "nowhere"])
