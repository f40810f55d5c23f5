"""A layer that is left out is as good as not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from phasewise.errors import UserError
from tests.bench.test_scripts import load, table
from tests.serve.tiny_chat import chat_checkpoint


def shortened(source: Path, target: Path, without: int) -> Path:
    """A checkpoint that never had that layer."""
    shutil.copytree(source, target)
    kept = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        before, _, rest = name.partition("layers.")
        number, _, rest = rest.partition(".")
        if not rest:
            kept[name] = tensor
        elif int(number) != without:
            kept[f"{before}layers.{int(number) - (int(number) > without)}.{rest}"] = tensor
    save_file(kept, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] - 1}))
    return target


def test_a_layer_left_out_is_as_if_it_had_never_been(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out, plot = load("layer_ablation", monkeypatch), tmp_path / "rows.jsonl", tmp_path / "plot.png"
    words = ["--examples", "2", "--model"]
    script.main([*words, str(chat_checkpoint()), "--out", str(out), "--plot", str(plot)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["layer"] for row in rows] == [None, 0, 1] and rows[0]["more"] == 0
    for layer, row in enumerate(rows[1:]):
        short = shortened(chat_checkpoint(), tmp_path / str(layer), layer)
        whole = script.measured(script.arguments([*words, str(short)]))[0]
        assert row["loss"] == pytest.approx(whole.loss, abs=1e-4)
        assert row["more"] == pytest.approx(row["loss"] - rows[0]["loss"], abs=1e-4)
    assert rows[1]["loss"] != rows[2]["loss"]
    assert len(table(capsys.readouterr().out, "without")) == 3 and plot.stat().st_size > 1000


@pytest.mark.parametrize(("least", "code"), [("-100", 0), ("100", 1)])
def test_a_layer_that_is_worth_too_little_is_a_failure(least: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("layer_ablation", monkeypatch)
    with pytest.raises(SystemExit) as left:
        script.main(["--examples", "2", "--model", str(chat_checkpoint()), "--least", least])
    assert left.value.code == code


def test_one_window_has_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--examples 1: an interval needs at least 2"):
        load("layer_ablation", monkeypatch).main(["--examples", "1"])
