"""`phasewise keys new`: what it prints is a key, and a file that lets it in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phasewise.serve.guard.keys import KeyRing
from tests.cli.conftest import Cli


@pytest.mark.parametrize("name", ["alice", "team-1", "a.b"])
def test_what_is_printed_lets_in(cli: Cli, tmp_path: Path, name: str) -> None:
    said = cli("keys", "new", name)
    assert said.code == 0
    (secret,) = re.findall(r"shown only once\): (\S+)", said.out)
    path = tmp_path / "keys.toml"
    path.write_text(said.out[said.out.index("[keys.") :])
    assert secret not in path.read_text()
    assert KeyRing(path, ["tiny"]).find([(b"x-api-key", secret.encode())]).key.name == name


def test_what_is_no_name_is_refused(cli: Cli) -> None:
    said = cli("keys", "new", "two words")
    assert said.code == 2 and "'two words' is no name for a key" in said.err
