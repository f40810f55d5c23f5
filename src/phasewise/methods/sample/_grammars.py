"""From what a request asks for to a compiled grammar, within bounds of size and time."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from phasewise.errors import UserError
from phasewise.methods.sample._words import INSTALL, Words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

KINDS = ("json_schema", "regex", "choice", "grammar")
AROUND = "around"  # grammars in which @answer is what one of KINDS asks for: {"start": Lark, name: Lark}
REASONING = "reasoning"  # tags within which an end token is the reasoning's end: {"open", "close", "opened"}
PANIC = "PanicException"  # of Rust: no Exception
KEPT = 128  # compiled grammars
TEXT = 1 << 17  # characters of a schema, of all choices
RULES = {"regex": 1 << 14, "grammar": 1 << 16}  # characters of these
LITERAL = 1 << 14  # characters of one text in a schema, of one choice
CHOICES = 4096  # also values of an enum, branches of an anyOf, members of an object
DEEP = 64  # levels of a schema
COUNT = 1 << 20  # of these
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
FIXED = {"const", "enum"}
EXACT = 2**53 - 1  # llguidance reads numbers as float64
MULTIPLE = 100_000  # of multipleOf
COUNTS = {end + what for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")}
BLANK = r"[\x20\x0A\x0D\x09]{1,40}"  # between the tokens of JSON: endless blanks would be a text that never ends
OPTIONS: Any = {"whitespace_pattern": BLANK, "lenient": False, "coerce_one_of": False}


@dataclass(frozen=True)
class Compiled:
    """A grammar at its beginning, which is never moved: requests have copies."""

    matcher: LLMatcher

    def start(self) -> LLMatcher:
        return self.matcher.deep_copy()


class Grammars:
    """Compiles what is asked for one vocabulary, and keeps what was used last. For any thread."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None

    def get(self, ask: Mapping[str, Any]) -> Compiled:
        """The grammar of what is asked. Raises UserError naming what cannot be honoured."""
        fits(ask)
        key = json.dumps({kind: ask[kind] for kind in (*KINDS, AROUND) if kind in ask})
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            tokenizer = self._tokenizer = self._tokenizer or self.words.tokenizer()
        found = compiled(ask, tokenizer)
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found


@lru_cache(maxsize=4)
def grammars_of(words: Words) -> Grammars:
    """The compiled grammars of a vocabulary, shared by all requests."""
    return Grammars(words)


def compiled(ask: Mapping[str, Any], tokenizer: LLTokenizer) -> Compiled:
    """Raises UserError beginning with the kind of grammar."""
    from llguidance import LLMatcher

    try:
        kind, text = written(ask)
        if AROUND in ask:
            text = _around(ask[AROUND], text, lark=kind in ("choice", "grammar"))
        text.encode()
    except UnicodeEncodeError as wrong:
        raise UserError(f"a grammar is text, and half of a surrogate pair is none ({wrong.reason})") from wrong
    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # some find out here that they are too complex, or allow nothing
    except BaseException as failed:
        if type(failed).__name__ != PANIC:
            raise
        raise UserError(f"{kind} cannot be honoured: {reason(PANIC)}") from failed
    if matcher.is_error():
        error = matcher.get_error()
        raise UserError(
            f"{kind} cannot be honoured: {'no text follows it' if 'NoExtension' in error else reason(error)}"
        )
    return Compiled(matcher)


def written(ask: Mapping[str, Any]) -> tuple[str, str]:
    """(kind, what llguidance compiles). Raises UserError for what is malformed or too large."""
    kinds = [kind for kind in KINDS if kind in ask]
    if len(kinds) > 1:
        raise UserError(f"{' and '.join(kinds)} are given: a text can follow one of them")
    (kind,) = kinds
    value = ask[kind]
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise UserError(f"{kind} needs the extra ({error}): {INSTALL}") from error
    _check(kind, value)
    try:
        if kind == "json_schema":
            return kind, LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=OPTIONS)
        if kind == "choice":
            return kind, LLMatcher.grammar_from_lark(f"start: {' | '.join(_choices(value))}")
        return kind, grammar_from("regex" if kind == "regex" else "grammar", value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{kind} cannot be honoured: {reason(str(error) or 'nested too deep')}") from error


def _check(kind: str, value: Any) -> None:
    """Raise UserError for what is of another type than its kind, or too large. Choices are checked as they are read."""
    if kind == "json_schema":
        if not isinstance(value, dict):
            raise UserError("json_schema must be a JSON Schema: an object")
        _bounded(value)
    elif kind != "choice":
        if not isinstance(value, str) or not value:
            raise UserError(f"{kind} must be a text that is not empty")
        _fits(kind, len(value), RULES[kind])
        if kind == "grammar":
            _embedded(value)


def _around(grammars: Mapping[str, str], answer: str, lark: bool) -> str:
    """Returns what llguidance compiles of several grammars. `answer` is Lark, or what it makes of a schema or
    expression."""
    inner = {"lark_grammar": answer} if lark else json.loads(answer)["grammars"][0]
    for text in grammars.values():
        _fits("grammar", len(text), TEXT)
        _embedded(text)
    named = [{"name": name, "lark_grammar": text} for name, text in grammars.items()]
    return json.dumps({"grammars": [*named, {**inner, "name": "answer"}]})


def fits(ask: Mapping[str, Any]) -> None:
    """Raise UserError for what is larger than anybody needs, before anything is made of it that takes time."""
    if isinstance(ask.get("json_schema"), dict):
        _bounded(ask["json_schema"])
    if isinstance(choice := ask.get("choice"), list):
        _many(choice)


def _many(choice: list[Any]) -> None:
    if len(choice) > CHOICES:
        raise UserError(f"choice has {len(choice):,} texts; at most {CHOICES:,} are allowed")


def _choices(value: Any) -> Iterator[str]:
    """Literals of Lark."""
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise UserError("choice must be a list of texts, none of them empty")
    _many(value)
    _fits("choice", max(map(len, value)), LITERAL)
    _fits("choice", sum(map(len, value)), TEXT)
    return (json.dumps(each, ensure_ascii=False) for each in value)


def _fits(name: str, size: int, most: int) -> None:
    if size > most:
        raise UserError(f"{name} has {size:,} characters; at most {most:,} are allowed")


def _embedded(text: str) -> None:
    """Raise UserError for a schema within Lark (%json) that is larger than anybody needs."""
    for found in re.finditer(r"%json\s*(?=\{)", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise UserError(f"grammar: %json is followed by no JSON ({error or 'nested too deep'})") from error
        _bounded(schema)


def _inner(name: str, value: dict[str, Any] | list[Any], fixed: bool) -> list[tuple[str, Any]]:
    """What a part of a schema holds, by keyword; inside of `fixed` values and of lists it is their own keyword's."""
    if isinstance(value, list):
        return [(name, each) for each in value]
    return [(name if fixed else key, each) for key, each in value.items()]


def _bounded(schema: dict[str, Any]) -> None:
    """Raise UserError for a schema that is larger than anybody needs, and for numbers that would not be exact, naming
    the keyword."""
    todo: list[tuple[str, Any, int, bool]] = [("json_schema", schema, 1, False)]
    values, multiple = 0, 1
    while todo:
        name, value, depth, fixed = todo.pop()
        values += 1
        if 2 * values > TEXT:  # each takes two characters at least
            raise UserError(f"json_schema has more than {TEXT:,} characters, and may not")
        if depth > DEEP:
            raise UserError(f"json_schema: {name} is nested deeper than {DEEP} levels")
        if isinstance(value, dict | list):
            if len(value) > CHOICES:
                raise UserError(f"json_schema: {name} has {len(value):,} values; at most {CHOICES:,} are allowed")
            todo += [(key, each, depth + 1, fixed or key in FIXED) for key, each in _inner(name, value, fixed)]
        elif isinstance(value, str):
            _fits(f"json_schema: {name}", len(value), LITERAL)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _exact(name, value, fixed)
            if name == "multipleOf" and not fixed:
                multiple = _multiple(value, multiple)
    _fits("json_schema", len(json.dumps(schema)), TEXT)


def _exact(name: str, value: float, fixed: bool) -> None:
    """Raise UserError for a number that would not be honoured to the last digit, or not in reasonable time."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"json_schema: {name}={value} is no number of JSON")
    if name in COUNTS and value > COUNT:
        raise UserError(f"json_schema: {name}={value} is more than {COUNT:,}")
    if (fixed or name in BOUNDS) and abs(value) > EXACT:
        raise UserError(f"json_schema: {name}={value} is beyond 2^53 and cannot be honoured to the last digit")


def _multiple(value: float, others: int) -> int:
    """The least common multiple of digits of multipleOf, points left out: an automaton has so many states."""
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    whole = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
    found = math.lcm(others, whole) if whole else others
    if found > MULTIPLE:
        raise UserError(f"json_schema: multipleOf={value} (with others: {found:,}) is more than {MULTIPLE:,}")
    return found


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=200_000, verbose_errors=False)


def reason(error: str) -> str:
    """The message of a mistake, on one line. Those about llguidance's own code are left out."""
    if "panic" in error.lower():
        return "llguidance has failed on it"
    return " ".join(error.partition("<non-verbose")[0].split())[:400]
