"""`phasewise report`, and the record of a load that it reads."""

from __future__ import annotations

import json
from pathlib import Path

from phasewise.report.lives import DECODE, recording
from tests.bench.test_load import Served, at
from tests.cli.conftest import Cli
from tests.report.test_page import load
from tests.serve.tiny_chat import chat_checkpoint


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    done = cli("report", load(tmp_path / "one.jsonl"), "--out", tmp_path / "new" / "page.html", "--title", "mine")
    assert done.code == 0, done.err
    assert "<title>mine</title>" in (tmp_path / "new" / "page.html").read_text()
    assert cli("report", tmp_path / "nowhere.jsonl").code == 2
    (tmp_path / "file").write_text("")
    assert "cannot be written" in cli("report", tmp_path / "one.jsonl", "--out", tmp_path / "file" / "x.html").err


def test_a_load_on_record(cli: Cli, tmp_path: Path) -> None:
    """Of a server that tells no events, too."""
    run, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    run.write_text("what was there before\n")
    with at(Served(pieces=4)) as url:
        done = cli("bench", "load", "--url", url, "--requests", 3, "--rate", 50, "--record", run)
    assert done.code == 0 and "nothing was heard of the server's own events (UserError: HTTP 404" in done.out
    first, *rows = [json.loads(line) for line in run.read_text().splitlines()]
    assert first["bench"] == "load" and first["command"].startswith("phasewise")
    assert [row["served"] for row in rows] == [0, 1, 2] and all(row["tokens"] and not row["error"] for row in rows)
    assert cli("report", run, "--out", page).code == 0 and "Who waited how long" in page.read_text()


def test_the_servers_own_events_are_on_record(cli: Cli, tmp_path: Path) -> None:
    """Times count from the first one, whatever the server's clock says."""
    run, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    done = cli("bench", "load", "--model", chat_checkpoint(), "--requests", 3, "--rate", 50, "--record", run,
               "--workload", "fixed:prompt=12,new=6")  # fmt: skip
    assert done.code == 0 and "nothing was heard" not in done.out
    first, *rows = [json.loads(line) for line in run.read_text().splitlines()]
    told = recording([row for row in rows if "event" in row])
    assert told is not None and told.start == 0.0 and 0 < told.end < 300
    assert [(life.prompt_tokens, life.output_tokens, life.how) for life in told.lives] == [(12, 6, "finished")] * 3
    assert sum(work.prefill for work in told.work) == 36 and first["counters"]["prompt_tokens"] == 36
    assert all(life.spans(told.end)[-1].phase == DECODE for life in told.lives)
    assert cli("report", run, "--out", page).code == 0
    assert "Both phases, request by request: run" in page.read_text()


def test_every_bar_says_which_worker_did_it(cli: Cli, tmp_path: Path) -> None:
    """Of a server whose phases are apart."""
    run, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    done = cli("bench", "load", "--model", chat_checkpoint(), "--requests", 4, "--rate", 50, "--record", run,
               "--workload", "fixed:prompt=12,new=6", "--place", "disaggregated:prefill=2,decode=1")  # fmt: skip
    assert done.code == 0 and "nothing was heard" not in done.out, done.err
    told = recording([row for row in map(json.loads, run.read_text().splitlines()) if "event" in row])
    assert told is not None and len(told.lives) == 4
    rows = {worker: [0, 0] for worker in told.workers}
    for work in told.work:
        rows[work.worker][0] += work.prefill
        rows[work.worker][1] += work.decode
    (decodes,) = (worker for worker, (_, decode) in rows.items() if decode)
    given = dict.fromkeys(rows, 0)
    for life in told.lives:
        by = {what: worker for _, what, worker in life.stages}
        assert by["admitted"] == by["first_token"] == by["sent"] != by["owned"] == by["left"] == decodes
        given[by["admitted"]] += 12
    assert given == {worker: prefill for worker, (prefill, _) in rows.items()}
    assert cli("report", run, "--out", page).code == 0
    text = page.read_text()
    assert "The hand-off in five stages: run" in text
    for life in told.lives:
        for span in life.spans(told.end):
            assert f"<title>request {life.number}: {span.phase}{', ' * bool(span.worker)}{span.worker}, " in text
