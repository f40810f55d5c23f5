"""`phasewise simulate`: numbers as JSON and as a table, and mistakes answered by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasewise.cli import main

DEVICE = ["simulate", "--device", "h100", "--model", "pocket", "--rate", "50", "--requests", "40"]


def test_numbers_come_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "n.json"
    with pytest.raises(SystemExit) as ended:
        main([*DEVICE, "--place", "splitwise:prompt=1,token=1", "--ttft", "100", "--out", str(out), "--goodput"])
    said = capsys.readouterr().out
    assert not ended.value.code and "| TTFT |" in said and "goodput: " in said
    numbers = json.loads(out.read_text())
    assert numbers["requests"] == numbers["handoffs"] == 40 and numbers["failed"] == 0
    assert numbers["good_share"] == 1.0 and numbers["goodput_per_device_per_s"] == numbers["goodput_per_s"] / 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["simulate"], "give one of the two"),
        (["simulate", "--device", "h100"], "--device needs --model"),
        (["simulate", "--device", "h1000", "--model", "pocket"], "unknown device 'h1000'"),
        (["simulate", "--profile", "none.json"], "the profile 'none.json' cannot be read"),
        ([*DEVICE, "--goodput"], "--goodput needs targets"),
        ([*DEVICE, "--rate", "-1"], "rate=-1 is not a rate"),
        ([*DEVICE, "--place", "disaggregated", "--device", "prefill=h100"], "no device is given for decode workers"),
        ([*DEVICE, "--device", "decoed=l4,h100"], "a device is given for 'decoed' workers"),
        ([*DEVICE, "--die", "now"], "'now' is no death"),
        ([*DEVICE, "--die", "0@1"], "one engine has no router"),
        ([*DEVICE, "--ways", "7"], "ways=7 does not divide"),
        ([*DEVICE, "--workload", "trace:path=none.csv"], "cannot be read"),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], words: list[str], error: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err
