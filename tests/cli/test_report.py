"""`phasewise report`, and the record of a load that it reads."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.test_load import Served, at
from tests.cli.conftest import Cli
from tests.report.test_page import load


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
    assert first["bench"] == "load" and first["command"].startswith("phasewise ")
    assert [row["served"] for row in rows] == [0, 1, 2] and all(row["tokens"] and not row["error"] for row in rows)
    assert cli("report", run, "--out", page).code == 0 and "Who waited how long" in page.read_text()
