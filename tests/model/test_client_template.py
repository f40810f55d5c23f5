"""Templates of strangers, in a process of their own: what they may take, and that nothing of them is left."""

from __future__ import annotations

import os

import pytest

from phasewise.errors import UserError
from phasewise.model.chat import ChatTemplate, ClientTemplate
from phasewise.model.sandbox import MOST_REASON

MESSAGES = [{"role": "user", "content": "héllo 🎉"}]
TEXT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}"
TEXT += "{% if add_generation_prompt %}[you]{% endif %}"
TOKENS = {"bos_token": "<s>"}


@pytest.mark.parametrize("more", [{"mood": "!", "add_generation_prompt": False}, {"continue_final_message": True}])
def test_it_renders_as_the_models_own_does(more: dict[str, object]) -> None:
    own = ChatTemplate({"default": TEXT}, TOKENS)
    assert ClientTemplate(TEXT, TOKENS).render(MESSAGES, **more) == own.render(MESSAGES, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "turns|longer than"),
        ("{{ '%9999999999d' % 1 }}", "MemoryError|more than|makes"),
        ("{{ 'a'|center(10 ** 10) }}", "MemoryError|more than|cannot render"),
        ("{{ ('a' * 9000000) ~ '' }}", "9,000,000 characters"),
        ("{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
         "MemoryError|more than|cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|cannot render"),
        ("{{ raise_exception('x' * 100000) }}", "xxx"),
        ("{% for %}", "does not parse"),
        ("{% include '/etc/passwd' %}", "cannot render"),
        ("{{ cycler.__init__.__globals__.os.environ }}", "unsafe|cannot render"),
    ],
)  # fmt: skip
def test_a_hostile_one_ends_with_a_reason(attack: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        ClientTemplate(attack, TOKENS).render(MESSAGES)
    assert len(str(refused.value)) <= MOST_REASON


def test_it_is_another_process() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert ClientTemplate("ok", {}).render(MESSAGES) == "ok"
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
