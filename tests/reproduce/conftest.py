from __future__ import annotations

from tests.cli.conftest import cli as cli
