"""`phasewise simulate`: numbers as JSON and as a table, and mistakes answered by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasewise.cli import main
from phasewise.plan.fit import FittedLine
from phasewise.plan.profile import Measured, Profile
from phasewise.plan.shape import DecoderShape

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


def test_the_tail_is_a_target_of_simulations_and_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plan = tmp_path / "n.json", tmp_path / "p.toml"
    words = ["--device", "h100", "--model", "pocket", "--requests", "300", "--tbt", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words, "--rate", "50", "--out", str(out)])
    said, numbers = capsys.readouterr().out, json.loads(out.read_text())
    assert not ended.value.code and "| TBT |" in said
    assert numbers["good_share"] == 1.0 and 0 < numbers["tbt_p50_s"] <= numbers["tbt_p99_s"] < 1e-3
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words, "--places", "colocated", "--schedules", "sarathi", "--config", str(plan), "--ttft", "2",
              "--workload", "fixed:prompt=1000,new=8"])  # fmt: skip
    said = capsys.readouterr()
    assert not ended.value.code and "the target of P99 TBT is a fifth tighter" in said.out, said.err
    assert json.loads(plan.with_suffix(".plan.json").read_text())["tbt"] == 0.001
    assert "tbt" not in plan.read_text(), "a server has no such target"


@pytest.mark.parametrize(("text", "error"), [
    ("", "lacks the column TIMESTAMP"), ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has 0 requests"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4,4\n", "none from start=1 on"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_empty_traces_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str, command: str
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(text)
    start = ",start=1" if "2023" in text else ""
    with pytest.raises(SystemExit) as ended:
        main([command, *DEVICE[1:5], "--ttft", "50", "--workload", f"trace:path={trace}{start}", "--requests", "1"])
    assert ended.value.code == 2 and error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "note"),
    [(["--ttft", "0.4"], "--ttft 0.4 are milliseconds; for 0.4 s write --ttft 400"),
     (["--tpot", "0.05"], "for 0.05 s write --tpot 50"), (["--ttft", "50", "--link", "50"], "--link 50 is 50 bytes/s")],
)  # fmt: skip
def test_units_that_are_probably_meant_otherwise_are_said(
    capsys: pytest.CaptureFixture[str], words: list[str], note: str
) -> None:
    with pytest.raises(SystemExit):
        main([*DEVICE, *words])
    said = capsys.readouterr().out
    assert "note: " in said and note in said


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_profile_of_another_machine_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    line = FittedLine({"base": 0.01, "prefill_rows": 0.001, "decode_rows": 0.001}, 0.0)
    one = Measured("", 2, {}, {"mixed": line}, {}, 1024)
    there = {"cpu": "Another CPU", "cores": 2}
    profile = Profile(there, {"name": "pocket"}, DecoderShape(2, 64, 4, 2, 16, 128, 512), {}, [one])
    profile.save(tmp_path / "profile.json")
    words = f"--requests 200 --rate 3 --workload fixed:prompt=100,new=5 --ttft 500 --profile {tmp_path}/profile.json"
    more = ["--places", "colocated", "--schedules", "sarathi", "--config", str(tmp_path / "p.toml")]
    with pytest.raises(SystemExit) as ended:
        main([command, *words.split(), *(more if command == "plan" else [])])
    said = capsys.readouterr()
    assert not ended.value.code and "note: the profile was taken on 'Another CPU'" in said.out, said.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["simulate"], "give one of the two"),
        (["simulate", "--device", "h100"], "--device needs --model"),
        (["simulate", "--device", "h1000", "--model", "pocket"], "unknown device 'h1000'"),
        (["simulate", "--profile", "none.json"], "the profile 'none.json' cannot be read"),
        ([*DEVICE, "--goodput"], "--goodput needs targets"),
        (["plan", *DEVICE[1:5]], "targets are needed"),
        (["plan", *DEVICE[1:5], "--tbt", "0"], "targets are milliseconds above 0"),
        ([*DEVICE, "--rate", "-1"], "rate=-1 is not a rate"),
        ([*DEVICE, "--place", "disaggregated", "--device", "prefill=h100"], "no device is given for decode workers"),
        ([*DEVICE, "--device", "decoed=l4,h100"], "a device is given for 'decoed' workers"),
        ([*DEVICE, "--layout", "prefill=1x1"], "a device is given for 'prefill' workers"),
        ([*DEVICE, "--layout", "all=1"], "is no layout"),
        ([*DEVICE, "--die", "now"], "'now' does not say which worker dies"),
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
