"""`phasewise datastore`: a folder's texts become something that --draft retrieval finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.cli.app import main
from phasewise.llm import LLM


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(["datastore", *words])
    return int(done.value.code or 0)


def test_a_folder_becomes_a_datastore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / ".hidden").mkdir(parents=True)
    (tmp_path / "mine" / ".hidden" / "no.txt").write_text("never")
    (tmp_path / "mine" / "picture.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "mine" / "a.py").write_text("import os\nimport sys\nimport re\n" * 4)
    store = tmp_path / "store"
    assert run(str(store), "--folder", str(tmp_path / "mine")) == 0
    assert "of 1 texts" in capsys.readouterr().out
    plain, llm = LLM("pocket"), LLM("pocket", draft=f"retrieval:store={store}")
    want, got = (which.generate(["import os\nimport"], max_tokens=24, temperature=0)[0] for which in (plain, llm))
    assert got.tokens == want.tokens
    assert llm.engine.counters.drafted > 0


@pytest.mark.parametrize(
    ("made", "words", "said"),
    [
        ("mine", ["store", "--folder", "nowhere"], "--folder nowhere: there is no such folder"),
        ("mine", ["store", "--folder", "mine"], "there is no text in it"),
        ("store/full", ["store"], "store is there and not an empty folder"),
    ],
)
def test_what_cannot_be_is_refused(
    made: str, words: list[str], said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path(made).mkdir(parents=True)
    assert run(*words) == 2
    assert said in capsys.readouterr().err
