"""The files of docs/deploy: whatever they name is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from shutil import which
from typing import Any

import pytest

import phasewise.serve.app
from phasewise.request.counters import Counters
from phasewise.serve import server
from phasewise.serve.guard.keys import KeyRing
from phasewise.serve.loop import Snapshot
from phasewise.serve.watch.metrics import Metrics
from tests.cli.conftest import cli as cli
from tests.forked import ROOT
from tests.serve.test_keys import table

DEPLOY = ROOT / "docs" / "deploy"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all samples that a server with keys, recipes and workers has."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(table("alice"))
    metrics = Metrics(1 << 30, ["fast"])
    metrics.registry.register(KeyRing(path, ["tiny"]))
    metrics.errors[404] += 1
    metrics.tallies["fast"].ways["stop"] += 1
    apart = {"by_role": {"decode": Counters().as_dict()}, "by_recipe": {"fast": Counters().of_requests()}}
    text = metrics.render(Snapshot(counters=Counters().as_dict(), workers={"decode": 1}, **apart)).decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line[0] != "#"}


def test_every_counter_of_the_engine_is_exported(exported: set[str]) -> None:
    assert {f"phasewise_{field.name}_total" for field in fields(Counters)} <= exported


def test_the_dashboard_shows_what_is_exported(exported: set[str]) -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = set(re.findall(r"(?:phasewise|process)_\w+", " ".join(asked)))
    assert len(named) > 25 and named <= exported, named - exported
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})
    for name in exported:  # latencies are all there, and everything about keys
        if re.match(r"phasewise_key_|phasewise_.*_bucket", name):
            assert name in named or name.endswith("_created"), f"{name} is not shown"


def test_the_unit_is_one_and_waits_for_requests(tmp_path: Path) -> None:
    text = (DEPLOY / "phasewise.service").read_text()
    waits = re.search(r"TimeoutStopSec=(\d+)", text)
    assert waits and int(waits[1]) > server.PATIENCE + server.LAST_WORDS
    assert "ExecReload=/bin/kill -HUP $MAINPID" in text
    if which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    unit = tmp_path / "phasewise.service"
    for good in (True, False):
        program = sys.executable if good else "/no/such/program"
        unit.write_text(text.replace("/opt/phasewise/bin/phasewise", program))
        words = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert ("phasewise.service" in done.stderr) != good, done.stderr


@pytest.mark.parametrize("what", ["unit", "container"])
def test_what_they_start_is_a_server(what: str, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(phasewise.serve.app, "run", lambda llm, **options: seen.update(options))
    if what == "unit":
        (line,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "phasewise.service").read_text(), re.M)
        program, *words = line.split()
        assert Path(program).name == "phasewise" and words[-1] == "/etc/phasewise/phasewise.toml"
        words[-1] = str(DEPLOY / "phasewise.toml")
    else:
        text = (DEPLOY / "Containerfile").read_text()
        (entry,), (command,) = (re.findall(rf"^{word} (\[.*\])$", text, re.M) for word in ("ENTRYPOINT", "CMD"))
        assert json.loads(entry) == ["phasewise"]
        words = json.loads(command)
        copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.M)
        assert copied and all((ROOT / name).exists() for name in copied)
    assert cli(*words).code == 0
    assert (seen["host"], seen["port"], seen["policy"].log) == ("0.0.0.0", 8000, "json")
    assert str(seen["policy"].keys).endswith("keys.toml"), "who listens to all asks for keys"
