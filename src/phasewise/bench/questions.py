"""Conversations by task on which drafters are measured, from a file in the form of Spec-Bench or made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from phasewise.bench.prompts import text_prompts
from phasewise.bench.quality import TASKS
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.train.tasks import example, held_out

Asked = Mapping[str, Sequence[list[int]]]
"""Task -> prompts, as token ids."""
Message = Mapping[str, str]
Chat = Callable[[Sequence[Message]], list[int]]
"""The token ids of a conversation, up to where the answer begins."""
MADE = {"recall": "recall@1k", "arithmetic": "arithmetic", "edits": "edit", "lists": "list"}
"""Task -> the row of `phasewise eval` whose questions it asks."""
CODE, CODE_TOKENS = "library code", 128
CHAT = "chat"
CHATS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that Spec-Bench counts as one task, multi-turn conversation (MT-Bench's)."""


def questions(path: Path, chat: Chat, per_task: int | None, unlearned: bool = False) -> dict[str, list[list[int]]]:
    """First turns by task, evenly spread ones where `per_task` are fewer. A line is a JSON object with `turns`, a list
    of texts, or `prompt`, a text; and `category`. With `unlearned`, only lines that training on this file holds out
    (`train/written.py`). Raises UserError naming a line that is none of these, and if no line is left."""
    found: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip() and (held_out(line) or not unlearned):
            task, text = _question(line, f"{path}, line {number}")
            found.setdefault(task, []).append(text)
    if not found:
        kind = "question that training holds out (one in 16 is)" if unlearned else "question"
        raise UserError(f"prompts={str(path)!r} holds no {kind}: write one JSON object a line")
    return {
        task: [chat([{"role": "user", "content": text}]) for text in spread(texts, per_task)]
        for task, texts in found.items()
    }


def _question(line: str, where: str) -> tuple[str, str]:
    try:
        said: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg}") from error
    turns = (said.get("turns") or [said.get("prompt")]) if isinstance(said, dict) else []
    if not turns or not isinstance(turns[0], str) or not turns[0]:
        raise UserError(f'{where}: write {{"category": TASK, "turns": [TEXT, ...]}}')
    category = said.get("category", CHAT)
    return (CHAT if category in CHATS else str(category)), turns[0]


def made(
    chat: Chat, encode: Callable[[str], list[int]], begin: Sequence[int], per_task: int, seed: int
) -> dict[str, list[list[int]]]:
    """Held-out library source to go on with, and questions of generated tasks. `encode` adds nothing to a text; `begin`
    is what comes before each."""
    take = text_prompts(encode("\n\n".join(sources(held_out=True).values())), seed, begin)
    found = {CODE: [take(CODE_TOKENS) for _ in range(per_task)]}
    for task, row in MADE.items():
        kind, length = TASKS[row]
        rng = Random(f"{seed} {row}")
        found[task] = [chat(example(kind, rng, length).messages) for _ in range(per_task)]
    return found


def spread(items: Sequence[str], n: int | None) -> Sequence[str]:
    """`n` of them, evenly spread; all where they are no more, or `n` is None."""
    return items if n is None or n >= len(items) else [items[i * len(items) // n] for i in range(n)]
