"""Answers that tests write themselves: a message may say which text the model is to give."""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from phasewise.llm import LLM
from phasewise.methods.sample.standard import Standard
from phasewise.model.tokenizer import Tokenizer
from phasewise.request.request import Request
from phasewise.verbs.sample import Context, Dist
from tests.serve.tiny_chat import CONTEXT, VOCAB, write_tokenizer
from tests.tiny import write_checkpoint

PLAY = re.compile(r"play:([A-Za-z0-9+/=]*);")
SPECIAL = ["[TOOL_CALLS]", "[ARGS]"]
TURN = "<|im_start|>{{ m.role }}\n"
HEAD = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
"""
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ open }}{% endif %}"
TEMPLATES = {  # how models of these families write calls
    "hermes": HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if m.name %} ({{ m.name }}){% endif %}""" + TAIL,
    "thinking": "{# <think></think> #}" + HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}""" + TAIL,
    "llama3": HEAD + """{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}\
{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}""" + TAIL,
    "mistral": HEAD + """{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}\
{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}\
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}\
{{ ", " if not loop.last }}{% endfor %}]{% endif %}""" + TAIL,
    "named": HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]\
{{ c.function.arguments }}{% endfor %}""" + TAIL,
    "pythonic": HEAD + """{{ m.content }}{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}(\
{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ", " if not loop.last }}{% endfor %})\
{{ ", " if not loop.last }}{% endfor %}]{% endif %}""" + TAIL,
    "opened": HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}""" + TAIL.replace("{{ open }}", "<think>\n"),
    "branches": "{% if custom is defined %}{% set tools = custom %}{% endif %}{% if not tools is defined %}"
    "{% set tools = none %}{% endif %}" + HEAD + """{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}\
{{ '{"name": "' + c.name + '", ' }}{{ '"parameters": ' }}{{ c.arguments | tojson }}{{ "}" }}{% else %}\
{{ m.content }}{% endif %}""" + TAIL,
    "coder": HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""" + TAIL,
    "fenced": HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}{{ "<｜tool▁calls▁begin｜>" if loop.first }}\
<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments }}
```<｜tool▁call▁end｜>{{ "<｜tool▁calls▁end｜>" if loop.last }}{% endfor %}""" + TAIL,
    "separated": HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}{{ "<｜tool▁calls▁begin｜>" if loop.first }}\
<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>\
{{ "<｜tool▁calls▁end｜>" if loop.last }}{% endfor %}""" + TAIL,
    "tool_code": HEAD + """{{ m.content }}{% for c in m.tool_calls or [] %}{{ "```tool_code" if loop.first }}
print({{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}\
{{ ", " if not loop.last }}{% endfor %})){{ "\n```" if loop.last }}{% endfor %}""" + TAIL,
    "unknown": HEAD + "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}" + TAIL,
    "described": HEAD + '{# write <tool_call>{"name": ...}</tool_call> #}{{ m.content }}' + TAIL,
}  # fmt: skip


@cache
def checkpoint(template: str) -> Path:
    """A tiny model with one of the templates; made once per process."""
    path = Path(tempfile.mkdtemp(prefix=f"phasewise-{template}-"))
    write_checkpoint(path, layers=2, vocab=VOCAB + len(SPECIAL), context=CONTEXT)
    write_tokenizer(path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(SPECIAL)
    backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATES[template]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def play(text: str) -> str:
    """What a message says to have this answered."""
    return f"play:{base64.b64encode(text.encode()).decode()};"


def playing(llm: LLM) -> LLM:
    """The model with a sample method that obeys the last such message of a prompt, as far as a grammar lets it."""
    tokenizer, end = llm.tokenizer, llm.model.config.eos[0]
    plain = Standard.__call__

    def sampled(self: Standard, logits: Any, contexts: Sequence[Context]) -> Dist:
        own = plain(self, logits, contexts)
        for row, context in enumerate(contexts):
            script = _script(context.request, tokenizer, end)
            if script:
                at = min(context.position - context.request.prompt_len, len(script) - 1)
                if float(logits[row, script[at]]) > float("-inf"):
                    own.top[row] = script[at]
        return Dist(own.top, own.vocab)

    Standard.__call__ = sampled  # type: ignore[method-assign]
    Standard.greedy = lambda self, contexts: False  # type: ignore[method-assign]
    return llm


def _script(request: Request, tokenizer: Tokenizer, end: int) -> list[int]:
    found: list[int] | None = request.state.get("play")
    if found is None:
        said = PLAY.findall(tokenizer.decode(request.tokens[: request.prompt_len]))
        text = base64.b64decode(said[-1]).decode() if said else ""
        found = request.state["play"] = [*tokenizer.encode(text, add_special=False), end] if said else []
    return found
