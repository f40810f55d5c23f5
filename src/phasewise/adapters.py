"""The LoRA adapters of a model that is loaded: each is a recipe of its own, and once more for every other recipe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phasewise import recipes
from phasewise.engine.binding import settle
from phasewise.engine.limits import Limits
from phasewise.engine.lora import LORA, Lora
from phasewise.errors import UserError, near
from phasewise.model.config import ModelConfig
from phasewise.options import defaults

Methods = Mapping[str, Any]
Bases = Mapping[str, str]  # by the recipe's name for users ("": none), its name in the engine
BESIDE = "+"  # between a recipe and an adapter
AGAIN = "#"  # before the number of a recipe whose methods have changed while it was served
LONGEST = 128  # characters of a name


@dataclass(frozen=True, slots=True)
class Products:
    """The recipes of one adapter: in the engine, by its name for users what it is called there; and why there are no
    others."""

    lora: Lora
    named: Mapping[str, str]
    refused: Mapping[str, str]
    methods: dict[str, Methods]  # by the name in the engine


class Adapters(Mapping[str, Lora]):
    """The adapters by name. It knows what their recipes are called, and asks no engine.

    A recipe FAST with the adapter SQL is called `FAST+SQL` in the engine, and `default+SQL` without a recipe; what
    comes later under a name that there has been has a number behind it, since requests under way keep theirs.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._products: dict[str, Products] = {}
        self._used: set[str] = set()  # names that there have been

    def __getitem__(self, name: str) -> Lora:
        return self._products[name].lora

    def __iter__(self) -> Iterator[str]:
        return iter(self._products)

    def __len__(self) -> int:
        return len(self._products)

    def read(self, name: str, path: str, config: ModelConfig) -> Lora:
        """The adapter in a folder. Raises UserError for a name that is taken or none, for one adapter too many, and for
        files that do not fit the model."""
        self.check(name)
        return Lora.read(name, path, config, self._limits.max_lora_rank)

    def check(self, name: str) -> None:
        """Raise UserError unless an adapter of this name may be added."""
        if not recipes.NAME.fullmatch(name) or len(name) > LONGEST:
            raise UserError(f"adapter {name[:LONGEST]!r} is not a name: take letters, digits, '.', '_' and '-', "
                            f"{LONGEST} at most")  # fmt: skip
        if name in self:
            raise UserError(f"there is an adapter {name!r} already: unload it first, or take another name")
        if len(self) >= self._limits.max_loras:
            raise UserError(f"{len(self)} adapters are loaded and no more may be: unload one, or raise --max-loras")

    def products(self, lora: Lora, bases: Bases, methods: Callable[[str], Methods]) -> Products:
        """An adapter with each recipe that goes together with it. `methods`: those of a recipe, by its name in the
        engine. Raises UserError where the adapter cannot be had without a recipe."""
        before = self._products.get(lora.name)
        named, refused, made = dict[str, str](), dict[str, str](), dict[str, Methods]()
        for public, base in bases.items():
            own = {**methods(base), LORA: lora.bare()}
            try:
                settle(own, defaults())
            except UserError as error:
                if not public:
                    raise
                refused[public] = str(error)
                continue
            name = None if before is None else before.named.get(public)
            if name is None or before is None or before.methods[name] != own:
                name = self._name(public, lora.name)
            named[public], made[name] = name, own
        return Products(lora.bare(), named, refused, made)

    def take(self, products: Products) -> None:
        """These are what an adapter is from now on."""
        self._products[products.lora.name] = products

    def drop(self, name: str) -> Collection[str]:
        """Forget an adapter. Returns what its recipes are called in the engine. Raises UserError for an unknown one."""
        self.known(name)
        return self._products.pop(name).methods.keys()

    @property
    def recipes(self) -> list[str]:
        """What the engine calls the recipes of all adapters."""
        return [name for products in self._products.values() for name in products.methods]

    def methods(self, name: str) -> dict[str, Methods]:
        """An adapter's recipes by their names in the engine; none of an adapter that there is not."""
        return self._products[name].methods if name in self._products else {}

    def known(self, name: str) -> Products:
        """Raises UserError for an adapter that there is not."""
        if name not in self._products:
            has = near(name, self) if self else "none is loaded"
            raise UserError(f"there is no adapter {name!r}. {has}")
        return self._products[name]

    def recipe(self, name: str, public: str) -> str:
        """What the engine calls a recipe ("": none) with an adapter. Raises UserError where there is no such thing."""
        products = self.known(name)
        if public in products.refused:
            raise UserError(
                f"the adapter {name!r} cannot be used with the recipe {public!r}: {products.refused[public]}"
            )
        if public not in products.named:
            raise UserError(f"unknown recipe {public!r}. {near(public, filter(None, products.named))}")
        return products.named[public]

    def _name(self, public: str, adapter: str) -> str:
        plain = f"{public or recipes.DEFAULT}{BESIDE}{adapter}"
        name = plain if plain not in self._used else f"{plain}{AGAIN}{len(self._used)}"
        self._used.add(name)
        return name
