"""The slow, obvious twin of the readers: it has the whole text, and asks every prefix of an object what it is."""

from __future__ import annotations

import json
import re
import string

QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
HEAD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL,
)  # fmt: skip
Item = tuple[str, ...]  # ("text", text) or ("call", name, arguments)
Found = tuple[Item | None, int]  # a call, or None; and where reading goes on


def depth(text: str) -> float:
    """How many brackets are open at the end of this start of an object; nan if it cannot be one, -1 within a string."""
    bare = QUOTED.sub("", text)
    quoted = '"' in bare
    bare = bare[: bare.index('"')] if quoted else bare
    if set(bare) - set(string.ascii_letters + string.digits + string.whitespace + "+-.,:{}[]"):
        return float("nan")
    kept = re.sub(r"[^{}\[\]]", "", bare)
    while (shorter := kept.replace("{}", "").replace("[]", "")) != kept:
        kept = shorter
    return float("nan") if re.search(r"[}\]]", kept) else -1 if quoted else len(kept)


def grown(text: str, at: int, start: int, wanted: int) -> tuple[int, bool]:
    """Where text[at:] first has `wanted` open brackets, from `start` on, or where it goes wrong, or its end."""
    for end in range(start, len(text) + 1):
        open_ = depth(text[at:end])
        if open_ != open_:
            return end - 1, False
        if open_ == wanted:
            return end, True
    return len(text), False


def call(text: str, at: int, tools: set[str], plain: bool) -> Found:
    """The call that begins at a "{"."""
    for end in range(at + 1, len(text) + 1):
        held, open_ = text[at:end], depth(text[at:end])
        if open_ != open_:
            return None, end - 1
        if open_ == 0:
            return complete(held, tools), end
        if plain and open_ == 1 and held.endswith(":") and not re.match(r'\{\s*"(name|type|id)"\s*:', held):
            return None, end
        head = HEAD.fullmatch(held) if open_ == 2 else None
        if head and named(head[1]) in tools:
            closed, fine = grown(text, at, end + 1, 1)
            over = grown(text, at, closed + 1, 0)[0] if fine else closed
            return ("call", named(head[1]), text[end - 1 : closed]), over
    return None, len(text)


def named(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return "?"


def complete(held: str, tools: set[str]) -> Item | None:
    try:
        value = json.loads(held)
        arguments = value.get("arguments", value.get("parameters"))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    if value.get("name") not in tools or not (arguments is None or isinstance(arguments, dict)):
        return None
    return ("call", value["name"], json.dumps(arguments or {}, ensure_ascii=False))


def gap(text: str, at: int, besides: str = "") -> int:
    """Where white space (and these characters) ends."""
    while at < len(text) and (text[at].isspace() or text[at] in besides):
        at += 1
    return at


def hermes(text: str, tools: set[str]) -> list[Item]:
    found: list[Item] = []
    at, due = 0, False
    while at < len(text):
        if text.startswith("<tool_call>", at):
            begins = gap(text, at + 11)
            item, end = call(text, begins, tools, False) if text[begins : begins + 1] == "{" else (None, begins)
            found.append(item or ("text", text[at:end]))
            due, at = item is not None, end
        elif text.startswith("</tool_call>", at) and due:
            due, at = False, at + 12
        else:
            due = due and text[at].isspace()
            found.append(("text", text[at]))
            at += 1
    return found


def llama3(text: str, tools: set[str]) -> list[Item]:
    found: list[Item] = []
    at, tag, after, expected = 0, "", False, True
    while at < len(text) or tag:
        if expected:
            begins = gap(text, at, ";," if after else "")
            item, end = call(text, begins, tools, not tag) if text[begins : begins + 1] == "{" else (None, begins)
            if item is None and not (after and end == len(text) and not text[begins:]):
                found.append(("text", tag + text[at:end]))
            found += [item] if item else []
            at, tag, after, expected = end, "", item is not None, item is not None
        elif text.startswith("<|python_tag|>", at):
            at, tag, expected = at + 14, "<|python_tag|>", True
        else:
            found.append(("text", text[at]))
            at += 1
    return found


def mistral(text: str, tools: set[str]) -> list[Item]:
    found: list[Item] = []
    at = 0
    while at < len(text):
        if not text.startswith("[TOOL_CALLS]", at):
            found.append(("text", text[at]))
            at += 1
            continue
        begins = gap(text, at + 12)
        if text[begins : begins + 1] == "[":
            items, end = several(text, begins, tools)
        elif text[begins : begins + 1] == "{":
            item, end = call(text, begins, tools, False)
            items = [item] if item else []
        else:
            items, end = by_name(text, begins, tools)
        found += items or [("text", text[at:end])]
        at = end
    return found


def several(text: str, begins: int, tools: set[str]) -> tuple[list[Item], int]:
    items: list[Item] = []
    last = at = begins + 1
    while True:
        at = gap(text, at, ",")
        if text[at : at + 1] == "]":
            return items, at + 1
        item, end = call(text, at, tools, False) if text[at : at + 1] == "{" else (None, at)
        if item is None:
            left = [] if at == len(text) else [("text", text[last:end])]
            return (items + left if items else []), end
        items.append(item)
        last = at = end


def by_name(text: str, begins: int, tools: set[str]) -> tuple[list[Item], int]:
    found = re.compile(r"[\w.-]*(?:\[CALL_ID\][\w.-]*)*(?:\[ARGS\])?").match(text, begins)
    assert found
    end = found.end()
    name = re.match(r"[\w.-]*", found[0])
    assert name
    if text[end : end + 1] == "{" and name[0] in tools:
        closed, _ = grown(text, end, end + 1, 0)
        return [("call", name[0], text[end:closed])], closed
    while (
        not found[0].endswith("[ARGS]")
        and end < len(text)
        and any(  # the start of a tag that is none
            tag.startswith(text[found.end() : end + 1]) for tag in ("[CALL_ID]", "[ARGS]")
        )
    ):
        end += 1
    return [], end


READERS = {"hermes": hermes, "llama3": llama3, "mistral": mistral}


def tidy(items: list[Item], fresh: bool = False) -> list[Item]:
    """Neighbouring texts joined; white space beside calls dropped."""
    found: list[Item] = []
    text = ""
    for item in [*items, None]:
        if item is not None and item[0] == "text":
            text += item[1]
            continue
        text = text.lstrip() if fresh else text
        text = text.rstrip() if item is not None else text
        found += [("text", text)] if text else []
        text, fresh = "", True
        found += [item] if item is not None else []
    return found
