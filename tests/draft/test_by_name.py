"""Every drafter by its name alone: on the pocket model, offline, with the tokens of plain decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from phasewise import catalog
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.load import files_of
from phasewise.methods.draft._datastore import encoded, vocabulary
from phasewise.request.params import Params
from tests.serve.tiny_chat import chat_checkpoint

PROMPTS = [
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir(sys.argv[1]):\n        print(name)\n\n\ndef",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
]
GREEDY = Params(max_tokens=24, ignore_eos=True)


def tokens(**verbs: str) -> tuple[list[list[int]], LLM]:
    llm = LLM("pocket", dtype="float32", limits=Limits(kv_bytes=256 << 20), **verbs)
    return [output.tokens for output in llm.generate(PROMPTS, GREEDY)], llm


@cache
def plain() -> list[list[int]]:
    return tokens(draft="none")[0]


@pytest.mark.parametrize("name", catalog.names("draft"))
def test_pocket_says_what_it_says_without(name: str) -> None:
    found, llm = tokens(draft=name)
    assert found == plain()
    counters = llm.engine.counters
    if name != "aggressive":  # it copies what a request marks, and nothing is marked here
        assert counters.drafted > 0
    assert counters.accepted <= counters.drafted


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    files = files_of(str(chat_checkpoint()))
    encoded(files, ["the quick fox"]).save(tmp_path / "other", vocabulary(files), "a text")
    for name in ("retrieval", "aded"):
        with pytest.raises(UserError, match="made for another tokenizer .*phasewise datastore OUT --model"):
            LLM("pocket", draft=f"{name}:store={tmp_path / 'other'}")
