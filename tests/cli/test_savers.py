"""`phasewise bench savers`: two contenders, two rounds, and everything that is written; mistakes by name."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from phasewise.bench import bandwidth
from phasewise.bench import savers as bench_savers
from phasewise.bench.bandwidth import StreamedWeight
from phasewise.bench.savers import BatchLoad
from phasewise.cli import savers
from tests import tiny
from tests.cli.conftest import Cli

SMALL = ("--tokens", 48, "--new", 2, "--rounds", 2, "--kv-bytes", "32M")


class Known:
    """Memory whose rate is known."""

    rate = staticmethod(lambda: 16e9)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "StreamedWeight", Known)


def test_the_machine_reads_in_a_time_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every run takes half a second."""
    monkeypatch.setattr(bandwidth.time, "perf_counter", itertools.count(0.0, 0.5).__next__)
    assert StreamedWeight((64, 256)).rate(3) == 64 * 256 * 2 / 0.5


def test_tables_csv_plot_and_page(cli: Cli, tmp_path: Path) -> None:
    model, name = str(tiny.checkpoint()), tiny.checkpoint().name
    out = {file: tmp_path / "new" / file for file in ("t.csv", "t.png", "t.md")}
    words = ("--csv", out["t.csv"], "--plot", out["t.png"], "--write", out["t.md"], "--model", model)
    said = cli("bench", "savers", "store=int8", "skip=unified", "--batch", "2,1", *SMALL, *words)
    assert said.code == 0 and "memory was read at 16.0 GB/s" in said.out
    assert said.out.count("| dense |") == said.out.count("| store=int8 |") == 2
    assert said.out.index("2 at once") < said.out.index("1 at once")
    assert "not run: skip=unified: " in said.out
    with out["t.csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch"], row["setting"], row["number"]) for row in rows] == [
        (batch, setting, number)
        for batch in "21"
        for number, settings in (("0", ("dense", "store=int8")), ("1", ("store=int8", "dense")))
        for setting in settings
    ]
    assert {row["tokens"] for row in rows} == {"48"} and {row["model"] for row in rows} == {name}
    assert all(float(row["seconds"]) > 0 and float(row["read"]) > 0 for row in rows)
    for stem in ("t-1", "t-2"):
        assert out["t.png"].with_stem(stem).read_bytes().startswith(b"\x89PNG")
    page = out["t.md"].read_text()
    assert page.count("| store=int8 |") == 2 and page.count(f"## {name}, 48 tokens") == 1 and model not in page
    assert cli("bench", "savers", "store=int8", *SMALL, "--write", out["t.md"], "--model", model).code == 0
    again = out["t.md"].read_text()
    assert again.count("| store=int8 |") == 3 and again.count(f"## {name}, 48 tokens") == 1  # 1, 4 and 8 at once


def test_a_shape_is_random_weights_with_just_enough_context(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    load = BatchLoad(48, [1], 2, 2)
    with savers._model("pocket", "2x128", load) as path:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    assert not Path(path).exists()
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 128)
    assert config["max_position_embeddings"] == 48 + load.most
    said = cli("bench", "savers", "store=int8", "--shape", "2x128", "--batch", "1", *SMALL)
    assert said.code == 0 and "2x128, bfloat16, prompts of 48 tokens" in said.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "pokcet"), "pocket"),
        (("--model", "TINY", "--tokens", 1020), "lower --tokens to at most 846"),
        (("--batch", "4,4"), "batch="),
        (("--batch", "0"), "batch="),
        (("--shape", "8by512"), "LAYERSxHIDDEN"),
        (("--shape", "8x100"), "multiple of 128"),
        (("--shape", "8x512", "--model", "smollm2"), "leave --model or --shape out"),
        (("--schedule", "sarathi"), "leave --schedule out"),
        (("evict=snapkw",), "snapkv"),
    ],
    ids=str,
)
def test_mistakes_are_named(cli: Cli, words: tuple[Any, ...], says: str) -> None:
    said = cli("bench", "savers", *(tiny.checkpoint() if word == "TINY" else word for word in words))
    assert said.code == 2 and says in said.err


def test_a_page_that_is_broken_is_refused_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- pocket 48:end -->\n")
    said = cli("bench", "savers", *SMALL, "--write", page)
    assert said.code == 2 and "pocket 48:begin" in said.err and page.read_text() == "<!-- pocket 48:end -->\n"


def test_what_has_been_measured_is_there_when_a_run_is_cut_short(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = bench_savers.Resident.enter

    def entering(self: bench_savers.Resident, prompt: Any, batch: int, most: int) -> None:
        if batch == 2:
            raise KeyboardInterrupt
        enter(self, prompt, batch, most)

    monkeypatch.setattr(bench_savers.Resident, "enter", entering)
    words = ("--batch", "1,2", *SMALL, "--csv", tmp_path / "t.csv", "--model", str(tiny.checkpoint()))
    assert cli("bench", "savers", "store=int8", *words).code != 0
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [row["batch"] for row in csv.DictReader(file)] == ["1"] * 4
