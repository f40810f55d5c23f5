from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from phasewise.cli import main


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `phasewise WORDS` in this process, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        code = left.value.code
        said = capsys.readouterr()
        return Said(code if isinstance(code, int) else 0, said.out, said.err)

    return run
