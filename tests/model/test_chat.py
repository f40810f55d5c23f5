"""Chat templates: what checkpoints rely on, and what a hostile one may not do."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from phasewise.errors import UserError
from phasewise.model import sandbox
from phasewise.model.chat import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '2 + 2 < 5 & "so"?'},
    {"role": "assistant", "content": "é"},
    {"role": "user", "content": "thanks"},
]
CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\n<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>' \
+ message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
TOOLS = """{{ tools | tojson }}|{{ messages | tojson(indent=2) }}|{% for m in messages %}{% if m.role == 'system' %}\
{% continue %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}
  {% if enable_thinking %}
    think
  {% endif %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, TOKENS)


@pytest.mark.parametrize(
    ("source", "add_generation_prompt"),
    [(CHATML, False), (LLAMA2, True), (TOOLS, True)],
    ids=["chatml", "llama2", "tools"],
)
def test_equals_transformers(source: str, add_generation_prompt: bool) -> None:
    extra: dict[str, Any] = {"tools": [{"name": "é<&>", "n": 1}], "enable_thinking": True}
    from transformers.utils.chat_template_utils import render_jinja_template  # which takes long

    theirs, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=add_generation_prompt, **extra, **TOKENS
    )
    ours = template(source).render(MESSAGES, add_generation_prompt, **extra)
    assert ours == theirs[0]
    assert "thanks" in ours


EVERY = """{% if tools is not none %}Tools: {{ tools | tojson }}{% endif %}{% if documents is not none %}Documents\
{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{{ m.reasoning_content }}]\
({{ m.thinking }}){% endfor %}"""
PARTS = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endif %}
{% endfor %}"""
TEXTS = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]


@pytest.mark.parametrize("source, messages", [
    (EVERY, [{"role": "user", "content": "hi"}]),
    (EVERY, [{"role": "assistant", "content": None, "tool_calls": None, "name": None}]),
    (EVERY, [{"role": "assistant", "content": "a", "reasoning": "because"}]),
    (EVERY, [{"role": "assistant", "content": "a", "thinking": "because", "reasoning_content": None}]),
    (PARTS, [{"role": "user", "content": TEXTS}, {"role": "assistant", "content": "b"}]),
    (PARTS, [{"role": "system", "content": TEXTS}, {"role": "user", "content": TEXTS[:1]}]),
])  # fmt: skip
def test_what_transformers_always_gives(source: str, messages: list[dict[str, Any]]) -> None:
    from transformers import PreTrainedTokenizerFast  # which takes long

    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    want = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert template(source).render(messages) == want


def test_parts_are_joined_where_the_template_writes_no_lists() -> None:
    """As the chat endpoint of transformers does, with a space."""
    for source in (CHATML, LLAMA2, TOOLS):
        whole = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "the fox"}]
        parts = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief"}]},
            {"role": "user", "content": TEXTS},
        ]
        assert template(source).render(parts) == template(source).render(whole)
    with pytest.raises(UserError, match="only parts"):
        template(CHATML).render([{"role": "user", "content": [{"type": "image", "url": "x"}]}])


@pytest.mark.parametrize("source", [CHATML, PARTS])
def test_a_final_message_in_parts_is_continued(source: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": TEXTS}]
    text = template(source).render(messages, continue_final_message=True)
    assert text.endswith("the fox" if source == CHATML else "<the><fox")


def test_generation_prompt_is_the_default() -> None:
    assert template(CHATML).render(MESSAGES).endswith("<|im_start|>assistant\n")
    assert template(CHATML).render(MESSAGES, False).endswith("thanks<|im_end|>\n")


def test_the_clock() -> None:
    assert template("{{ strftime_now('%Y') }}").render(MESSAGES) == str(datetime.now().year)


def test_a_template_may_refuse() -> None:
    with pytest.raises(UserError, match="roles must alternate"):
        template(LLAMA2).render([{"role": "assistant", "content": "first"}])


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{{ nothing() }}",
                                    "{% include 'x' %}", "{{ 'a' + 1 }}"])  # fmt: skip
def test_a_failing_template_is_a_user_error(source: str) -> None:
    with pytest.raises(UserError, match="cannot render"):
        template(source).render(MESSAGES)


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(UserError, match=r"'default' does not parse \(line 2"):
        template("fine\n{% if %}")


@pytest.mark.parametrize("attack", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ (messages | attr('__class__')).__name__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ namespace.__init__.__globals__['os'].system('true') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].getcwd() }}",
])  # fmt: skip
def test_a_hostile_template_reaches_nothing(attack: str) -> None:
    """Each either fails as a UserError or prints nothing: no attribute of a Python object gets out."""
    try:
        out = template(attack).render(MESSAGES)
    except UserError:
        return
    assert out.strip() == ""


@pytest.mark.parametrize("attack", ["{% set _ = messages.append(1) %}", "{% set _ = messages[0].update(role='x') %}",
                                    "{% set _ = messages.clear() %}"])  # fmt: skip
def test_messages_cannot_be_changed(attack: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(UserError):
        template(attack).render(messages)
    assert messages == MESSAGES


def test_named_templates() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert both.render(MESSAGES) == "plain"
    assert both.render(MESSAGES, tools=[{"name": "f"}]) == "tools"
    assert both.render(MESSAGES, tools=[]) == "plain"
    assert both.render(MESSAGES, template="rag") == "rag"
    with pytest.raises(UserError, match="Did you mean tool_use"):
        both.render(MESSAGES, template="tooluse")


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no chat template.*chat_template\.jinja"):
        ChatTemplate.load(tmp_path).render(MESSAGES)


def test_load(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "{{ bos_token }}{{ eos_token }}A"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "<s>A"
    config["chat_template"] = [{"name": "default", "template": "B"}, {"name": "tool_use", "template": "C"}]  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "B"
    assert ChatTemplate.load(tmp_path).render(MESSAGES, tools=[1]) == "C"
    (tmp_path / "chat_template.jinja").write_text("D")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("E")
    loaded = ChatTemplate.load(tmp_path)
    assert [loaded.render(MESSAGES, template=name) for name in (None, "rag", "tool_use")] == ["D", "E", "C"]


@pytest.mark.parametrize("attack", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% call m() %}{{ range(9999)|list|length }}"
    "{% endcall %}{% endfor %}",
])  # fmt: skip
def test_a_template_that_never_ends_is_ended(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.model.sandbox.SECONDS", 0.05)
    with pytest.raises(UserError, match=r"takes longer than 0\.05 s"):
        template(attack).render(MESSAGES)


@pytest.mark.parametrize("attack", ["{{ 'x' * 10000000000 }}", "{{ 9999999 * ('x' * 1000) }}",
                                    "{{ ([1] * 1000000000)|length }}", "{{ 9 ** (9 ** 9) }}",
                                    "{{ 2 ** 99999999 }}"])  # fmt: skip
def test_a_template_makes_nothing_huge(attack: str) -> None:
    with pytest.raises(UserError, match="would make more"):
        template(attack).render(MESSAGES)


def test_what_templates_multiply_stays_as_it_is() -> None:
    text = "{{ 3 * 4 }} {{ '-' * 3 }} {{ 2 ** 10 }} {{ 1.5 * 1e300 }} {{ 2 ** -1 }} {{ 3 * 10 ** 9 }}"
    assert template(text).render(MESSAGES) == f"12 --- 1024 1.5e+300 0.5 {3 * 10**9}"


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [[1, 2]] recursive %}{% for b in range(9999) %}{{ loop(a) if a is iterable }}{% endfor %}"
    "{% for c in range(99999) %}{% for d in range(999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a=3) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_would_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.SECONDS <= 5
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    with pytest.raises(UserError, match="cannot render"):
        template(source).render(MESSAGES)


def test_long_conversations_have_turns_enough() -> None:
    assert len(template(CHATML).render(MESSAGES * 2500)) > 200_000
