from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasewise.bench import report
from phasewise.bench.machine import cores, describe, kernels, peak_rss
from phasewise.ops import native


def test_json_lines_are_appended_and_rounded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    report.json_lines([{"a": 1.23456789, "b": None}], path)
    report.json_lines([{"a": 2, "b": "x"}], path)
    report.json_lines([{"a": 3}], None)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"a": 1.23457, "b": None},
        {"a": 2, "b": "x"},
    ]


def test_markdown_tables_align_numbers_to_the_right() -> None:
    assert report.markdown(["x", "y"], [["a", "1"]]) == "| x | y |\n|---|---:|\n| a | 1 |"


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1234.6, "1235"), (99.96, "100"), (0.0, "0"), (None, "-"), (12.34, "12.3")]
)
def test_short_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert report.short(value) == text


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB")])
def test_sizes_have_units(n: int, text: str) -> None:
    assert report.size(n) == text


def test_the_machine_is_named() -> None:
    about = describe()
    target = kernels().removesuffix(" kernels")
    assert target == "no native" or native.load(target) is not None, "those in use do load"
    assert about["cpu"] and about["cores"] == cores() >= 1 and peak_rss() > 1 << 20
