"""Recovery: the loss falls, only what conversion touched learns, and a resumed run is the same run."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phasewise.cli.app import main
from phasewise.model.model import Model
from phasewise.train import dense, kv_heads, mixture
from phasewise.train.kv_heads import KVHeadsJob
from phasewise.train.mixture import Stage
from tests.train import tiny
from tests.train.test_tools import SHAPE

STAGES = tuple(Stage(until, 200, 500, code=0.4, long=0.0, copies=0.4, short=48) for until in (0.5, 1.0))
TOUCHED = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.lively(SHAPE, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_heads, "SEEN", 2000)
    monkeypatch.setattr(kv_heads, "STAGES", STAGES)
    monkeypatch.setattr(mixture, "sources", lambda held_out: dict(enumerate(tiny.texts())))
    monkeypatch.setattr(kv_heads.looked_at, "__defaults__", (2000,))


@contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


def rows(out: Path) -> list[list[str]]:
    with (out / "recovery" / "losses.csv").open() as file:
        return [row[:6] for row in csv.reader(file)]  # all but the speed


def test_the_loss_falls_and_only_attentions_and_norms_learn(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_heads, "RATE", 0.02)
    plain = kv_heads.convert(KVHeadsJob(str(base), 1, tmp_path / "plain"), silent)
    out = kv_heads.convert(KVHeadsJob(str(base), 1, tmp_path / "one", tokens=14 * 500), silent)
    table = rows(out)
    assert table[0] == ["step", "tokens", "code_loss", "task_loss", "apart_loss", "pace"]
    first, last = (sum(float(row[2]) for row in some) / 3 for some in (table[1:4], table[-3:]))
    assert last < first - 0.5, "a base that was not trained knows nothing that could be lost, but text can be learned"
    assert all(float(row[4]) > 0 for row in table[1:])
    before, after = (load_file(path / "model.safetensors") for path in (plain, out))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        learned = any(part in name for part in (*TOUCHED, "norm"))
        assert tensor.dtype == torch.bfloat16 and (learned or torch.equal(tensor, before[name])), name
        assert not learned or tensor.ndim == 1 or not torch.equal(tensor, before[name]), name
    assert Model.load(out).config.kv_heads == 1
    assert Model.load(out).files.tokenizer().to_str() == Model.load(base).files.tokenizer().to_str()


def test_a_resumed_run_is_the_same_run(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kv_heads.convert(KVHeadsJob(str(base), 1, tmp_path / "whole", tokens=6 * 500), silent)
    real, seen = kv_heads.recovery_loss, []

    def broken(*given: object) -> object:
        seen.append(given)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(kv_heads, "recovery_loss", broken)
    monkeypatch.setattr(kv_heads, "PAUSE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        kv_heads.convert(KVHeadsJob(str(base), 1, tmp_path / "cut", tokens=6 * 500), silent)
    cut = kv_heads.convert(KVHeadsJob(str(base), 1, tmp_path / "cut", tokens=6 * 500, resume=True), silent)
    assert rows(cut) == rows(whole)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_nothing_is_apart_from_a_model_that_lost_nothing(base: Path) -> None:
    twin = dense.load(base)
    loss = kv_heads.recovery_loss(twin, twin, tiny.mixture().step(0, STAGES[0]))
    assert loss.parts["apart"] == pytest.approx(0.0, abs=1e-6)


def test_the_command_says_what_is_wrong(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--heads", "3"], "heads=3 does not divide the 2 KV heads"),
        (["--heads", "1", "--resume", "--tokens", "9"], "there is nothing to resume"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["convert", "kv_heads", str(base), "--out", str(tmp_path / "out"), *words])
        assert left.value.code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_converts(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", "kv_heads", str(base), "--heads", "1", "--out", str(tmp_path / "out")])
    assert not left.value.code and f"--model {tmp_path / 'out'}" in capsys.readouterr().out
    assert Model.load(tmp_path / "out").config.kv_heads == 1
