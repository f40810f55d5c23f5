"""Starts a real server, as the command line does, with faults on request:

python -m tests.serve.launch MODEL '{"host": ..., "port": ..., "queue": ..., "limits": {...}, "faults": {...}}'

Fields of Policy are options as well.

Faults: `pause` = seconds added to each step; `poison` = a token id whose requests cannot be computed;
`break_at` = the step that raises; `plays`: messages say what is answered (playing.py); `patience` = seconds that
requests have after a signal.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.request.request import Request
from phasewise.serve import server
from phasewise.serve.app import run
from phasewise.serve.guard.policy import BatchPolicy, Caps, ServePolicy
from tests.serve.playing import playing

POLICIES = tuple(field.name for field in fields(ServePolicy))


def faulty(llm: LLM, pause: float = 0.0, poison: int = -1, break_at: int = -1, plays: bool = False) -> LLM:
    """The model with an engine that misbehaves."""
    engine: Any = llm.engine
    step, embed = engine.step, llm.model.embed
    steps = 0

    def broken_step() -> list[Request]:
        nonlocal steps
        steps += 1
        if steps == break_at:
            raise RuntimeError("the engine's step is broken on purpose")
        time.sleep(pause)
        return step()

    def broken_embed(tokens: Any) -> Any:
        if poison >= 0 and bool((tokens == poison).any()):
            raise RuntimeError("this token is poison")
        return embed(tokens)

    if plays:
        playing(llm)
    engine.step = broken_step
    llm.model.embed = broken_embed  # type: ignore[method-assign]
    return llm


def main(model: str, text: str) -> None:
    options = json.loads(text)
    limits, faults = options.pop("limits", {}), options.pop("faults", {})
    verbs, recipes = options.pop("verbs", {}), options.pop("recipes", {})
    rules = {name: options.pop(name) for name in POLICIES if name in options}
    kinds: dict[str, Any] = {"batches": lambda given: BatchPolicy(**{**given, "folder": Path(given["folder"])})}
    kinds |= {"keys": Path, "caps": lambda given: Caps(**given), "tls": lambda given: tuple(map(Path, given))}
    policy = ServePolicy(**{name: kinds.get(name, lambda same: same)(value) for name, value in rules.items()})
    server.PATIENCE = faults.pop("patience", server.PATIENCE)
    try:
        run(
            lambda: faulty(LLM(model, limits=Limits(**limits), recipes=recipes, **verbs), **faults),
            policy=policy,
            **options,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
