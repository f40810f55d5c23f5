"""Structured output over HTTP: the fields of several servers that say which texts are wanted, as one `Params.ask`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from phasewise.errors import UserError
from phasewise.methods.sample._grammars import fits
from phasewise.serve.failures import ApiError

JSON_OBJECT = {"type": "object"}
OLDER = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
OPENAI = "response_format"  # what it says holds for the final answer: a model may call tools before it
FIELDS = (OPENAI, "structured_outputs", *OLDER, "json_schema", "grammar")


class Wanted(NamedTuple):
    """The constraint that one field of a request puts on its text."""

    field: str
    ask: dict[str, Any]


def of_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The constraint (`Params.ask`) of a text that is JSON of this schema: a tool's arguments, for example."""
    return {"json_schema": dict(schema)}


def wanted(fields: Mapping[str, Any]) -> Wanted | None:
    """Collects what the FIELDS of a request ask for. Absent fields are None. Raises ApiError naming the field."""
    found = [Wanted(name, ask) for name in FIELDS if (ask := _ask(name, fields.get(name))) is not None]
    if len(found) > 1:
        raise _refused(found[1].field, f"and {found[0].field} are given: a text can follow one of them")
    if not found:
        return None
    try:
        fits(found[0].ask)
    except UserError as error:
        raise ApiError(400, str(error), found[0].field, "invalid_value") from error
    return found[0]


def _ask(field: str, value: Any) -> dict[str, Any] | None:
    if value is None or (field == "grammar" and value == ""):
        return None
    if field == "response_format":
        return _response_format(value)
    if field == "structured_outputs":
        return _structured_outputs(value)
    if field == "grammar":
        return {"grammar": _text(field, value)}
    return _kind(field, OLDER.get(field, "json"), value)


def _response_format(value: Any) -> dict[str, Any] | None:
    """OpenAI's, and a `schema` beside json_object, which others have."""
    field, kind = "response_format", value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise _refused(field, f"has the type {kind!r}; it must be text, json_object or json_schema")
    known = {"text": set(), "json_object": {"schema"}, "json_schema": {"json_schema"}}[kind] | {"type"}
    _only(field, value, known)
    if kind == "text":
        return None
    if kind == "json_object":
        return of_schema(_schema(field, value.get("schema", JSON_OBJECT)))
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise _refused(field, "needs json_schema, an object with a name and a schema")
    _only(field, inner, {"name", "description", "schema", "strict"})
    if not isinstance(inner.get("strict"), bool | None):
        raise _refused(field, "has a strict that is neither true nor false")
    return of_schema(_schema(field, inner.get("schema", JSON_OBJECT)))  # texts follow it, be it strict or not


def _structured_outputs(value: Any) -> dict[str, Any]:
    """vLLM's: exactly one of json, regex, choice, grammar and json_object."""
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise _refused(field, "must be an object")
    given = {name: each for name, each in value.items() if each is not None and each is not False}
    _only(field, given, {"json", "json_object", "regex", "choice", "grammar"})
    if len(given) != 1:
        raise _refused(
            field, f"has {' and '.join(given) or 'nothing'}; it must have one of json, regex, choice and grammar"
        )
    ((kind, each),) = given.items()
    return _kind(field, kind, each)


def _kind(field: str, kind: str, value: Any) -> dict[str, Any]:
    if kind == "json_object":
        return of_schema(JSON_OBJECT)
    if kind == "json":
        return of_schema(_schema(field, value))
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _refused(field, "must give a list of texts to choose from")
        return {"choice": value}
    return {kind: _text(field, value)}


def _schema(field: str, value: Any) -> dict[str, Any]:
    """A schema, which may be written as text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise _refused(field, f"has a schema that is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise _refused(field, "has a schema that is no object")
    return found


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refused(field, "must give a text that is not empty")
    return value


def _only(field: str, value: Mapping[str, Any], known: set[str]) -> None:
    other = next((name for name, each in value.items() if name not in known and each is not None), None)
    if other is not None:
        raise _refused(field, f"has {other!r}, which is not supported here; it may have {', '.join(sorted(known))}")


def _refused(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field} {why}", field, "invalid_value")
