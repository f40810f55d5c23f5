"""Imports what servers import when they start, for the interpreter that they are forked from (tests/forked.py)."""

import llguidance  # noqa: F401
import pydantic.v1  # noqa: F401
import uvicorn.lifespan.on
import uvicorn.loops.uvloop  # noqa: F401

from phasewise import catalog
from phasewise.cli import serve  # noqa: F401
from tests.serve import launch  # noqa: F401

METHODS = list(catalog.every())
