"""Every drafter by its name alone: on the pocket model, offline, with the tokens of plain decoding."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from phasewise import catalog
from phasewise.engine.limits import Limits
from phasewise.errors import Untrained, UserError
from phasewise.llm import LLM
from phasewise.load import files_of
from phasewise.methods.draft._datastore import encoded, vocabulary
from phasewise.request.params import Params
from phasewise.train import artefacts
from phasewise.train.heads.kinds import KINDS
from tests import tiny
from tests.serve.tiny_chat import chat_checkpoint

PROMPTS = [
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir(sys.argv[1]):\n        print(name)\n\n\ndef",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
]
# drafters with heads for pocket
SHIPPED = (
    "chimera", "clover", "dflash", "diffuspec", "eagle", "falcon", "fspad", "gad", "hidden_transfer", "hydra",
    "kangaroo", "masked_mtp", "medusa", "mtp", "ppd",
)  # fmt: skip
GREEDY = Params(max_tokens=24, ignore_eos=True)


def tokens(**verbs: str) -> tuple[list[list[int]], LLM]:
    llm = LLM("pocket", dtype="float32", limits=Limits(kv_bytes=256 << 20), **verbs)
    return [output.tokens for output in llm.generate(PROMPTS, GREEDY)], llm


def needs(name: str) -> str:
    return str(catalog.method("draft", name).needs)


@cache
def plain() -> list[list[int]]:
    return tokens(draft="none")[0]


def names_its_training(error: Untrained) -> bool:
    """True if the error names a command that trains what is missing, of a kind that the trainer knows."""
    heads = re.search(r"Train them: phasewise train heads (\S+) --for \S+ --out ", str(error))
    artefact = re.search(r"Train them: phasewise train artefact ([a-z._0-9]+)\S* --model \S+ --out ", str(error))
    return (heads is not None and heads[1] in KINDS) or (artefact is not None and artefact[1] in artefacts.names())


@pytest.mark.parametrize("name", catalog.names("draft"))
def test_pocket_says_what_it_says_without(name: str) -> None:
    """A drafter whose heads do not ship for pocket says how they are trained."""
    try:
        found, llm = tokens(draft=name)
    except Untrained as error:
        assert name not in SHIPPED and names_its_training(error)
        return
    assert found == plain()
    counters = llm.engine.counters
    if name != "aggressive":  # it copies what a request marks, and nothing is marked here
        assert counters.drafted > 0
    assert counters.accepted <= counters.drafted


@pytest.mark.parametrize("name", [name for name in catalog.names("draft") if needs(name) == "trained"])
def test_untrained_drafters_name_a_command_that_exists(name: str) -> None:
    with pytest.raises(Untrained) as caught:
        tiny.engine({"draft": name})
    assert names_its_training(caught.value), caught.value


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    files = files_of(str(chat_checkpoint()))
    encoded(files, ["the quick fox"]).save(tmp_path / "other", vocabulary(files), "a text")
    for name in ("retrieval", "aded"):
        with pytest.raises(UserError, match="made for another tokenizer .*phasewise datastore OUT --model"):
            LLM("pocket", draft=f"{name}:store={tmp_path / 'other'}")
