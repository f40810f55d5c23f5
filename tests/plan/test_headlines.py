"""scripts/headlines.py: what it is called with, and verdicts that follow from numbers by rule."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "headlines.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("scripts_headlines", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def chat(targets: str, first: float, chunks: float, pools: float) -> dict[str, Any]:
    return {"load": "chat", "targets": targets, "ttft": 0.2, "tpot": 0.03, "first": first, "chunks": chunks,
            "pools": pools, "shape": "prefill=1,decode=1"}  # fmt: skip


@pytest.mark.parametrize(
    ("tight", "relaxed", "verdict"),
    [
        ((1.0, 1.5, 2.0), (4.0, 5.0, 3.0), "holds"),
        ((1.0, 1.5, 0.9), (4.0, 5.0, 3.0), "partly"),  # pools lose where they should win
        ((1.0, 1.5, 2.0), (4.0, 5.0, 6.0), "partly"),  # and win where they should not
        ((1.0, 1.5, 0.9), (4.0, 5.0, 6.0), "not here"),
        ((0.0, 1.5, 2.0), (4.0, 5.0, 3.0), "holds"),  # no rate at all meets the targets without pools
    ],
)
def test_distserves_verdict(script: ModuleType, tight: Any, relaxed: Any, verdict: str) -> None:
    told = script.told_distserve([chat("tight", *tight), chat("relaxed", *relaxed)])
    assert f"verdict: {verdict} (" in told
    assert ("only pools" in told) == (tight[0] == 0.0)


def test_it_runs_as_it_is_called(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From the words of the command to the file, over one load with few requests."""
    monkeypatch.setattr(script, "TARGETS", {"tight": (0.5, 0.05)})
    monkeypatch.setattr(script, "POOLS", script.POOLS[:1])
    monkeypatch.setattr(script, "SUMMARIES", script.CHAT)
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["headlines.py", "--out", str(out)])
    assert script.main() == 0
    rows = json.loads(out.read_text())["distserve"]
    assert [row["load"] for row in rows] == ["chat", "summarising"]
    assert all(min(row["first"], row["chunks"], row["pools"]) > 0 for row in rows)
    assert "verdict: " in capsys.readouterr().out
