"""Chat templates that requests bring: refused unless the server allows them, bounded where it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from phasewise.llm import LLM
from tests.serve.running import Server
from tests.serve.test_errors import CHAT, failure
from tests.serve.test_hostile import others_are_served

USER = [{"role": "user", "content": "the fox"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}"


@pytest.fixture(scope="module")
def open_minded() -> Iterator[Server]:
    with Server(allow_templates=True) as running:
        yield running


def ask(server: Server, **fields: Any) -> Any:
    return server.post(CHAT, {"messages": USER, "max_tokens": 8, "temperature": 0, **fields})


def test_a_server_takes_none_unless_it_was_told_to(server: Server) -> None:
    error = failure(ask(server, chat_template=TEMPLATE), 400)
    assert error["param"] == "chat_template" and "--allow-templates" in error["message"]
    assert ask(server, chat_template=None).status_code == 200


def test_the_prompt_is_what_the_template_writes(open_minded: Server, llm: LLM) -> None:
    said = ask(open_minded, chat_template=TEMPLATE, chat_template_kwargs={"mood": "jumps"}).json()
    ids = llm.tokenizer.encode("user: the fox\njumps", False)
    assert said["choices"][0]["message"]["content"] == llm.generate([ids], max_tokens=8)[0].text
    assert said["usage"]["prompt_tokens"] == len(ids)
    assert ask(open_minded).json()["usage"]["prompt_tokens"] == len(llm.encode_chat(USER)), (
        "the next has the model's own"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "turns|longer"),
        ("{{ '%9999999999d' % 1 }}", "MemoryError|more than"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{% if %}", "does not parse"),
        ("x" * 70_000, "at most 65536"),
        (3, "string"),
    ],
    ids=range(7),
)
def test_hostile_ones_hurt_nobody(open_minded: Server, llm: LLM, template: Any, reason: str) -> None:
    with others_are_served(open_minded, llm):
        error = failure(ask(open_minded, chat_template=template), 400)
    assert error["param"] == "chat_template"
    assert any(word in error["message"] for word in reason.split("|")), error
