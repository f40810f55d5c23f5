"""How many requests a budget holds: closed forms of what each takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.bench.drive import Bench
from phasewise.bench.fitting import fitting
from phasewise.bench.settings import BenchSetting
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from tests import tiny
from tests.bench.test_scripts import load, table

TOKENS, NEW, DENSE = 60, 4, 4


def need(**verbs: str) -> int:
    engine = Bench(tiny.model()).engine(verbs, Limits(kv_bytes=1 << 40))
    assert isinstance(engine, Engine)
    return engine.recipes[""].need(TOKENS + NEW)


def test_as_many_as_the_bytes_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, page = load("requests_that_fit", monkeypatch), tmp_path / "page.md"
    page.write_text("before\n")
    words = ["--model", str(tiny.checkpoint()), "--dtype", "float32", "--tokens", str(TOKENS), "--new", str(NEW)]
    script.main(["store=int8", "skip=unified", *words, "--dense", str(DENSE), "--write", str(page)])
    dense, int8, refused = table(capsys.readouterr().out, "setting")
    most = min(DENSE * need() // need(store="int8"), script.OFFERED * DENSE)
    assert most > 2 * DENSE  # rows of 24 floats and the like: a byte and a scale instead of four
    assert dense == ["dense", str(DENSE), "1.0", "0"]
    assert int8 == ["store=int8", str(most), f"{most / DENSE:.1f}", "0"]
    assert refused[:3] == ["skip=unified", "-", "-"]
    assert page.read_text().startswith("before\n") and "| store=int8 |" in page.read_text()


def test_what_does_not_fit_is_preempted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("requests_that_fit", monkeypatch)
    prompts = tiny.prompts(*[TOKENS] * 6)
    alone = need()
    roomy = script.engine_of(Bench(tiny.model()), BenchSetting("dense"), 6 * alone, 6)
    found = fitting(roomy, prompts, NEW)
    assert (found.most, found.preemptions) == (6, 0) and found.tokens_per_s
    tight = script.engine_of(Bench(tiny.model()), BenchSetting("dense"), 4 * alone, 6)
    assert fitting(tight, prompts, 80).preemptions > 0  # more tokens than were booked for
