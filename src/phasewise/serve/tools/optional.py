"""Answers that may be calls: free text, and from the opening of a call on what its tool's schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.serve.failures import ApiError
from phasewise.serve.tools.forced import arguments, closed, opens_json
from phasewise.serve.tools.formats import Format
from phasewise.serve.tools.reasoning import Tags

ANY, BLANK = r"(.|\n)*", r"[ \t\r\n]"
TERMINALS = [f"TEXT: /{ANY}/", f"SPACE: /{BLANK}+/"]


class Spelling:
    """Texts in Lark, where some `words` are special tokens of the vocabulary, by their ids."""

    def __init__(self, words: Mapping[str, int]) -> None:
        self.words = words
        self._cut = re.compile("(" + "|".join(map(re.escape, words)) + ")") if words else None

    def __call__(self, text: str) -> str:
        parts = self._cut.split(text) if self._cut else [text]
        return " ".join(self.token(part) or _quoted(part) for part in parts if part)

    def token(self, word: str) -> str:
        return f"<[{self.words[word]}]>" if word in self.words else ""

    def upto(self, rule: str, terminal: str, word: str) -> list[str]:
        """A rule for what a terminal allows up to the first `word`, be that a token or spelled out."""
        token = self.token(word)
        either = f" | {terminal} {token}" if token else ""
        return [f"{rule}_spelled[lazy]: {terminal} {_quoted(word)}", f"{rule}: {rule}_spelled{either}"]


def grammar(
    tools: Sequence[Mapping[str, Any]], format: Format, opening: str, spell: Spelling, tags: Tags | None, opened: bool
) -> dict[str, Any]:
    """What to ask (`Params.ask`) for an answer that may call some of these tools. `opening`: what a call to {name}
    begins with. Between the `tags` of reasoning, of which the prompt may have `opened` one, nothing is a call. Raises
    ApiError for a format in which calls have no beginning of their own, or whose arguments are not JSON."""
    opens_json(opening)
    if not format.trigger:
        raise ApiError(400, f"calls of the format {format.name} have no beginning of their own: name one tool in "
                       "tool_choice, or leave strict out", "tools", "unsupported_parameter")  # fmt: skip
    first = rf"/{BLANK}*([^{{ \t\r\n]{ANY})?/" if format.whole else f"/{ANY}/"
    rules = ["start: body"]
    if tags is not None:
        open_ = "" if opened else "open"
        rules = [f"start: {open_} thought body | {open_} TEXT" + ("" if opened else " | body")]
        rules += spell.upto("thought", "TEXT", tags.close)
        if not opened and tags.open in spell.words:
            rules.append(f"open: SPACE? {spell.token(tags.open)}")
        elif not opened:
            rules += ["open: OPEN", f"OPEN: /{BLANK}*/ {_quoted(tags.open)}"]
            first += f" & ~(/{BLANK}*/ {_quoted(tags.open)} /{ANY}/)"
    rules += [f"FIRST: {first}", *spell.upto("first", "FIRST", format.trigger)]
    if format.whole:
        rules += ["body: FIRST | (first SPACE? | SPACE?) calls (SEPARATOR? calls)*", r"SEPARATOR: /[ \t\r\n;,]+/"]
    else:
        rules += ["body: FIRST | first calls (more calls)* TEXT", *spell.upto("more", "TEXT", format.trigger)]
    return {"grammar": "\n".join([*rules, *_calls(spell, tools, format, opening), *TERMINALS])}


def _calls(spell: Spelling, tools: Sequence[Mapping[str, Any]], format: Format, opening: str) -> list[str]:
    """The rule `calls`: what follows the trigger, a call or a list of calls."""
    rules, lead = list[str](), ""
    for i, tool in enumerate(tools):
        before = opening.format(name=tool["function"]["name"])[:-1].rpartition(format.trigger)[2]
        lead, bracket, item = before.partition("[") if before.lstrip().startswith("[") else ("", "", before)
        lead += bracket
        item = item.lstrip() if format.whole else item
        rules.append(f"call{i}: {spell(item)} arguments{i} {spell(closed(item))}")
        function = tool["function"]
        rules.append(f"arguments{i}: {arguments(function.get('parameters') if function.get('strict') else None)}")
    any_ = " | ".join(f"call{i}" for i in range(len(tools)))
    several = f'{spell(lead)} call (/, ?/ call)* "]"' if lead else "call"
    return [f"call: {any_}", f"calls: {several} {spell(format.closing)}", *rules]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
