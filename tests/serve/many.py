"""A real server of several tiny models in a process of its own; the loads of some of them wait for a file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.load import weight_bytes
from phasewise.model.weights import LOADING
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.registry.app import run_models
from phasewise.serve.registry.slot import ModelEntry
from tests.forked import Forked
from tests.serve.running import Server
from tests.serve.tiny_chat import chat_checkpoint

KV = 1 << 20


def entry(name: str, model: str, gate: str, **options: Any) -> ModelEntry:
    """A model whose load waits until `gate`/`name` is there, if its name begins with slow; bad ones fail."""

    def load() -> LLM:
        if name.startswith("bad"):
            raise UserError(f"{model}/model.safetensors is broken")
        told = LOADING.get()
        assert told is not None
        while name.startswith("slow") and not (Path(gate) / name).exists():
            told(0.25)
            time.sleep(0.01)
        return LLM(model, limits=Limits(kv_bytes=KV))

    return ModelEntry(name, load, lambda: weight_bytes(model, None), KV, **options)


def start(model: str, gate: str, text: str) -> None:
    """In the process: `text` is JSON of {"models": {name: options}, "limit": how many fit, "wait", "keys"}."""
    said = json.loads(text)
    entries = [entry(name, model, gate, **options) for name, options in said["models"].items()]
    one = weight_bytes(model, None) + KV
    keys = said.get("keys")
    policy = ServePolicy(keys=None if keys is None else Path(keys))
    try:
        run_models(entries, limit=int(said["limit"] * one), wait=said["wait"], port=0, policy=policy)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class ManyServer(Server):
    """Such a server. `open(name)` lets the load of a slow model go on."""

    def __init__(self, gate: Path, *names: str, limit: float = 10, wait: float = 30, secret: str = "none",
                 keys: Path | None = None, **options: dict[str, Any]) -> None:  # fmt: skip
        self.gate = gate
        models = {name: options.get(name, {}) for name in names}
        said = {"models": models, "limit": limit, "wait": wait, "keys": None if keys is None else str(keys)}
        super().__init__(secret=secret, said=said)

    def _process(self, options: dict[str, Any]) -> Forked:
        return Forked(start, str(chat_checkpoint()), str(self.gate), json.dumps(options["said"]), errors=self._errors)

    def open(self, name: str) -> None:
        (self.gate / name).touch()

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.cards().values()}

    def cards(self) -> dict[str, dict[str, Any]]:
        found = self._http.get(f"{self.url}/v1/models", headers=self._headers).json()["data"]
        return {card["id"]: card for card in found}
