"""Recipe updates: recipes as plain data, which running workers take up."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from phasewise import catalog
from phasewise.engine.lora import LORA, Lora
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.engine.engine import Engine
    from phasewise.kv.handoff import Layouts
    from phasewise.kv.store import Store

log = logging.getLogger(__name__)
Recipes = Mapping[str, Mapping[str, Any]]  # by name, a method per verb
RecipeUpdate = dict[str, dict[str, list[Any]]]  # by recipe and verb, the verb that the method is of, and its text


def told(recipes: Recipes) -> RecipeUpdate:
    """Spell recipes as plain data, from which `read` builds equal ones elsewhere. Raises UserError for a method that
    has no text."""
    update: RecipeUpdate = {}
    for name, methods in recipes.items():
        homes = {verb: method.traits.verb for verb, method in methods.items()}
        update[name] = {verb: [home, _text(home, methods[verb])] for verb, home in homes.items()}
    if read(update) != recipes:
        raise UserError(f"recipes {', '.join(recipes)} have methods that cannot be written as text for the workers")
    return update


def read(update: RecipeUpdate) -> dict[str, dict[str, Any]]:
    """The recipes; a method that fills several verbs is one object, and so are a decode method's drafter and what
    stands for --draft. Raises UserError for a method that there is not here."""
    found = {}
    for name, texts in update.items():
        adapters = {verb: Lora.of(text) for verb, (home, text) in texts.items() if home == LORA}
        spelled = {verb: (home, text) for verb, (home, text) in texts.items() if home != LORA}
        built = {each: catalog.build(*each) for each in spelled.values()}
        methods = {verb: built[each] for verb, each in spelled.items()} | adapters
        held = {verb: part for verb, part in catalog.filled(methods["decode"]).items() if verb in methods}
        found[name] = {**methods, **held}
    return found


def _text(home: str, method: Any) -> Any:
    return method.text() if home == LORA else catalog.spell(home, method)


def forget(engine: Engine, layouts: Layouts, recipes: Collection[str]) -> None:
    """Requests name these recipes no more. Of a worker's KV nothing is on its way to them then: the router waits."""
    engine.forget(recipes)
    layouts.follow(stores_of(engine))


def learn(engine: Engine, layouts: Layouts, update: RecipeUpdate) -> str:
    """Let requests name these recipes as well. Returns why they cannot, or an empty text."""
    try:
        engine.learn(read(update))
    except Exception as error:
        log.warning("recipes %s cannot be learned: %s", ", ".join(update), error)
        return str(error) or type(error).__name__
    layouts.follow(stores_of(engine))
    return ""


def stores_of(engine: Engine) -> dict[str, Store]:
    return {name: runtime.store for name, runtime in engine.recipes.items()}
