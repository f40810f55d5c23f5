"""A chat template that a client sent: rendered in a process of its own, which may neither grow nor go on for ever.

The sandbox bounds turns and operators; what filters, methods and formats of strings can make (`"%9999999999d" % 1`) is
bounded by the process: its memory, its time, and the length of what it says.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.errors import UserError
from phasewise.model.chat import ChatTemplate

LONGEST = 1 << 16  # characters of a template
SECONDS = 10.0  # of the processor, for the process, its start included; the sandbox allows fewer
WAIT = 30.0  # seconds by the clock: it makes way for others
MEMORY = 512 << 20  # bytes of address space
MOST_TEXT = 8 << 20  # characters of a prompt
MOST_REASON = 400  # characters of what is told of an error
BEGIN = "import os; os.nice(10); from phasewise.model.apart import main; main()"  # imports, too, make way for others


@dataclass(frozen=True)
class Apart:
    """Renders as ChatTemplate does, with the same special tokens as variables."""

    text: str
    tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt. Raises UserError."""
        asked = {"text": self.text, "tokens": dict(self.tokens), "messages": messages, "variables": variables}
        try:
            done = subprocess.run(
                [sys.executable, "-c", BEGIN], input=json.dumps(asked).encode(), capture_output=True,
                timeout=WAIT, check=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UserError(f"The chat template takes longer than {WAIT:g} s.") from None
        except subprocess.CalledProcessError:  # killed by a limit
            raise UserError(f"The chat template takes more than {SECONDS:g} s or {MEMORY >> 20} MB.") from None
        said = json.loads(done.stdout)
        if "error" in said:
            raise UserError(said["error"])
        return str(said["text"])


def main() -> None:
    """Renders what stdin asks for, as JSON, and writes JSON."""
    asked = json.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        template = ChatTemplate({"default": asked["text"]}, asked["tokens"])
        text = template.render(asked["messages"], **asked["variables"])
        if len(text) > MOST_TEXT:
            raise UserError(f"The chat template makes a prompt of {len(text):,} characters: at most {MOST_TEXT:,}.")
        said = {"text": text}
    except (UserError, MemoryError, RecursionError) as error:
        said = {"error": (str(error) or f"The chat template fails: {type(error).__name__}.")[:MOST_REASON]}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
