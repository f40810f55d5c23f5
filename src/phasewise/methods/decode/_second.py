"""Shared parts of methods that make a prompt's KV of a second model's: which models fit, and how prompts are read."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from phasewise.errors import UserError
from phasewise.known import shelf
from phasewise.known.models import EMBEDDED
from phasewise.model.artefacts import fingerprint
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.source import source
from phasewise.request.request import Request
from phasewise.verbs.host import Host

Rows = list[tuple[Tensor, Tensor]]
"""Keys and values [H, r, D], layer by layer."""


def second(host: Host, method: str, role: str, name: str) -> Model:
    """The second model called `name`. Raises UserError where it does not go with the engine's."""
    other, model = host.load(name), host.model
    if other.config.vocab != model.config.vocab:
        raise UserError(f"{method}: {role} {name!r} has {other.config.vocab} token ids, but the model has "
                        f"{model.config.vocab}: choose one with the model's own tokenizer")  # fmt: skip
    if other.config.max_positions < model.config.max_positions:
        raise UserError(f"{method}: {role} {name!r} has a context of {other.config.max_positions}, and the model one "
                        f"of {model.config.max_positions}: choose one that can read as much")  # fmt: skip
    if same(other, model):
        raise UserError(f"{method}: {role} {name!r} is the model itself: choose another one")
    return other


def same(one: Model, other: Model) -> bool:
    """True if two models are one."""
    return one.config == other.config and fingerprint(one) == fingerprint(other)


@lru_cache(maxsize=16)
def config_of(name: str) -> ModelConfig:
    """The architecture of a second model that is not loaded: one that ships with the package, or lies at a path."""
    return parse_config(source(shelf.place(EMBEDDED[name]) if name in EMBEDDED else name).settings())


class PromptReader:
    """A second model that reads prompts, but for their last token, in pieces that the prompt alone decides: so what it
    makes of a prompt hangs on nobody else. What it holds is given back by `forget`."""

    def __init__(self, host: Host, name: str, model: Model, piece: int) -> None:
        self.companion = host.companion(name, model)
        self.companion.text = lambda request: request.prompt
        self.piece = piece

    def ahead(self, request: Request) -> int:
        """The number of tokens that it has read."""
        return request.prompt_len - self.companion.lag(request)

    def follow(self, request: Request, upto: int) -> None:
        """Read what pieces end at `upto` or before."""
        while (ahead := self.ahead(request)) + self.piece <= upto or ahead < upto == request.prompt_len - 1:
            self.read(request)

    def read(self, request: Request) -> int:
        """One more piece. -> how many tokens it has read"""
        self.companion.catch_up([request], self.piece)
        return self.ahead(request)

    def rows(self, request: Request, start: int, stop: int) -> Rows:
        """Its keys and values of some tokens of the prompt, as its cache holds them."""
        return self.companion.between(request, start, stop)

    def forget(self, request: Request) -> None:
        self.companion.forget(request)
