"""JSONSchemaBench: answers that a schema's grammar masks, against free ones and against any JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from phasewise.bench.rounds import ratio
from phasewise.bench.schemas import ENDLESS, SchemaCase, judge, pace
from phasewise.bench.stats import shares
from phasewise.methods.sample._words import words_of
from phasewise.reproduce.headroom import stranger_chat, stranger_text
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.play import LoadEntry, PlayedRun, finish
from phasewise.reproduce.system import (
    Attempt,
    AttemptOutcome,
    Case,
    Counter,
    Load,
    Paper,
    Saving,
    Setting,
    System,
    Timing,
)
from phasewise.reproduce.workload import STRANGER, PromptSource
from phasewise.request.params import Params
from phasewise.request.request import Request

GRAMMAR, FREE = Setting({"sample": "grammar"}), Setting({"sample": "standard"})
MANY, ROOM, FASTER = 4, 96, 1.5  # requests at once, tokens of an answer, and the speed that the paper finds
ANYTHING: Mapping[str, Any] = {"type": "array", "minItems": 4096}
NAME, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


@dataclass(frozen=True)
class SchemaTask:
    """A question, the schema of the answer, what tells a valid one, and instances that are valid or not."""

    wanted: str
    schema: Mapping[str, Any]
    check: Callable[[Any], bool]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def thing(**properties: Any) -> dict[str, Any]:
    """An object that has these and nothing else."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def has(value: Any, **kinds: type) -> bool:
    """True for an object of just these members, of these types."""
    return isinstance(value, dict) and {k: type(v) for k, v in value.items()} == kinds


FORMS = (
    SchemaTask("a person with a name and an age", thing(name=NAME, age=COUNT),
         lambda v: has(v, name=str, age=int) and v["age"] >= 0,
         ({"name": "Ada", "age": 36},), ({"name": "Ada"}, {"name": "Ada", "age": -1}, {"name": 3, "age": 3})),
    SchemaTask("a city with its country and whether it is a capital",
         thing(city=NAME, country=NAME, capital={"type": "boolean"}),
         lambda v: has(v, city=str, country=str, capital=bool),
         ({"city": "Lima", "country": "Peru", "capital": True},), ({"city": "Lima", "country": "Peru", "capital": 1},)),
    SchemaTask("three colours", {"type": "array", "items": {"enum": ["red", "green", "blue", "yellow"]}, "minItems": 3,
                           "maxItems": 3},
         lambda v: isinstance(v, list) and len(v) == 3 and set(v) <= {"red", "green", "blue", "yellow"},
         (["red", "blue", "red"],), (["red"], ["red", "blue", "pink"])),
    SchemaTask("a temperature in celsius or fahrenheit", thing(value={"type": "number"}, unit={"enum": ["C", "F"]}),
         lambda v: isinstance(v, dict) and set(v) == {"value", "unit"} and v["unit"] in ("C", "F")
         and isinstance(v["value"], int | float) and not isinstance(v["value"], bool),
         ({"value": 21.5, "unit": "C"},), ({"value": "21", "unit": "C"}, {"value": 21, "unit": "K"})),
    SchemaTask("a date", thing(year={"type": "integer", "minimum": 1900, "maximum": 2100},
                         month={"type": "integer", "minimum": 1, "maximum": 12}),
         lambda v: has(v, year=int, month=int) and 1900 <= v["year"] <= 2100 and 1 <= v["month"] <= 12,
         ({"year": 1999, "month": 12},), ({"year": 1899, "month": 1}, {"year": 2000, "month": 13})),
    SchemaTask("a product with a price or no price", thing(product=NAME, price={"anyOf": [COUNT, {"type": "null"}]}),
         lambda v: isinstance(v, dict) and set(v) == {"product", "price"} and isinstance(v["product"], str)
         and (v["price"] is None or (type(v["price"]) is int and v["price"] >= 0)),
         ({"product": "pen", "price": None}, {"product": "pen", "price": 2}), ({"product": "pen", "price": "2"},)),
    SchemaTask(
        "a code of two letters and three digits", thing(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
         lambda v: has(v, code=str) and len(v["code"]) == 5 and v["code"][:2].isupper() and v["code"][2:].isdigit(),
         ({"code": "AB123"},), ({"code": "ab123"}, {"code": "AB12"})),
    SchemaTask("two points of a plane", {"type": "array", "minItems": 2, "maxItems": 2,
                                   "items": thing(x={"type": "integer"}, y={"type": "integer"})},
         lambda v: isinstance(v, list) and len(v) == 2 and all(has(point, x=int, y=int) for point in v),
         ([{"x": 1, "y": -2}, {"x": 0, "y": 3}],), ([{"x": 1, "y": 2}], [{"x": 1}, {"x": 2}])),
)  # fmt: skip


def asking(ask: Mapping[str, Any] | None) -> Load:
    """Objects to write, as lists that no answer ends: following this schema, or none."""

    def load(asked: PromptSource) -> list[LoadEntry]:
        told = None if ask is None else {"json_schema": ask}
        return [LoadEntry(prompt, asked.size(64, 24), ask=told) for prompt, _ in asked.chats("json", MANY)]

    return load


def passes(case: Case, run: PlayedRun) -> float:
    """Returns the passes of a request per token."""
    return (run.work.emitted - run.work.accepted) / run.work.emitted


def valid(lab: Lab, ask: Callable[[SchemaTask], Mapping[str, Any] | None]) -> list[float]:
    """1 for every answer that is a valid instance of its schema, else 0."""
    requests = []
    for form in FORMS:
        told = (
            f"Give me {form.wanted} as JSON that follows this schema: {json.dumps(form.schema)}. Answer with JSON only."
        )
        schema = ask(form)
        params = Params(ROOM) if schema is None else Params(ROOM, ask={"json_schema": dict(schema)})
        requests.append(Request(stranger_chat(told), params))
    with lab.engine(GRAMMAR, STRANGER) as engine:
        finish(engine, requests)
    return [float(_follows(form, stranger_text().decode(one.out))) for form, one in zip(FORMS, requests)]


def _follows(form: SchemaTask, said: str) -> bool:
    try:
        return form.check(json.loads(said))
    except (ValueError, TypeError):
        return False


def more_valid(lab: Lab, other: Callable[[SchemaTask], Mapping[str, Any] | None]) -> AttemptOutcome:
    """Valid answers with the schema, less those with something else."""
    mine, theirs = valid(lab, lambda form: form.schema), valid(lab, other)
    lead = shares(mine, theirs)
    return AttemptOutcome(lead.low > 0, f"{lead.text(True)} ({sum(mine):.0f} and {sum(theirs):.0f} of {len(mine)})")


def judged(lab: Lab) -> AttemptOutcome:
    """Every instance that is marked valid can be written under the masks, and no other."""
    cases = [
        SchemaCase(
            form.wanted, form.schema, [(each, True) for each in form.valid] + [(each, False) for each in form.invalid]
        )
        for form in FORMS
    ]
    found = [verdict.how for verdict in judge(cases, stranger_text(), words_of(lab.model(STRANGER)))]
    return AttemptOutcome(set(found) == {"right"}, ", ".join(f"{found.count(how)} {how}" for how in sorted(set(found))))


def faster(lab: Lab) -> AttemptOutcome:
    """Time of a token in answers that follow a schema, against free ones, all at once."""
    prompts = [stranger_chat(f"Write the numbers of the year {1900 + i} as JSON.") for i in range(MANY)]
    with lab.engine(GRAMMAR, STRANGER) as engine:
        found = pace(lambda: engine, prompts, 64, lab.scale.rounds)
    gain = ratio(found.token["free"], found.token["schema"])
    assert gain is not None
    return AttemptOutcome(gain.low > 1, f"{gain} times as fast in {gain.n} rounds")


SYSTEM = System(
    title="JSONSchemaBench",
    paper=Paper("JSONSchemaBench: A Rigorous Benchmark of Structured Outputs for Language Models", "2501.10868"),
    claim="decoding under a grammar is 50 % faster than free decoding where tokens are forced, answers up to 4 % more "
    "of downstream tasks, and the best engine follows twice as many schemas as the worst.",
    conditions=("Llama-3.1-8B and 3.2-1B", "10,000 schemas from practice", "Guidance, Outlines, llama.cpp, XGrammar"),
    method=Setting(GRAMMAR.verbs, load=asking(ENDLESS)),
    baseline=FREE,
    control=Setting(GRAMMAR.verbs, load=asking(ANYTHING)),
    control_is="masks of a schema that allows any JSON: nothing is forced, and answers need not be what was asked",
    line="decoding under a schema's grammar: valid answers, 50 % faster where tokens are forced",
    promises=("answers", "cost", "time"),
    load=asking(None),
    missing=("the benchmark's own schemas (`phasewise bench grammar FILE` takes them)", "other engines",
             "downstream tasks under a grammar"),
    counters=(
        Counter("passes of free answers", "one for each token of a request, and all requests share them",
                lambda case: case.runs["baseline"].work.forwards,
                lambda case: max(entry.new for entry in case.entries) + len(case.entries), bound="at most"),
    ),
    savings=(
        Saving("passes per token", passes, "baseline", FASTER),
        Saving("passes per token", passes, "control", 1.02),
    ),
    attempts=(
        Attempt("answers", f"valid answers, {STRANGER}: with the schema's grammar less free ones", "all of it above 0",
                partial(more_valid, other=lambda form: None), model=STRANGER),
        Attempt("control", f"valid answers, {STRANGER}: less those under a grammar of any JSON", "all of it above 0",
                partial(more_valid, other=lambda form: {}), "answers", STRANGER),
        Attempt("mechanism", "instances marked valid or not, token by token under the masks", "all judged right",
                judged),
        Attempt("time", "time per token, a schema's answers against free ones", "above 1 in every round", faster),
    ),
    timings=(Timing("time per token at 512 tokens, masks that nobody asks for", tokens=512, price=True),),
    note="The schemas are eight of everyday use, written here.",
)  # fmt: skip
