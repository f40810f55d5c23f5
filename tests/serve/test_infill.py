"""`suffix`: prompts as each family writes them, and answers that end where the middle does."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from phasewise.llm import LLM
from phasewise.model.tokenizer import Tokenizer
from phasewise.serve.completions.infill import FORMS, Infill
from phasewise.serve.failures import ApiError
from tests.serve.running import Server
from tests.serve.test_errors import COMPLETE, failure
from tests.serve.tiny_chat import CONTEXT, VOCAB, chat_checkpoint, write_tokenizer
from tests.tiny import write_checkpoint

WORDS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def coder() -> Iterator[Path]:
    """A tiny model whose vocabulary has the tokens of Qwen2.5-Coder."""
    path = Path(tempfile.mkdtemp(prefix="phasewise-infill-"))
    write_checkpoint(path, layers=2, vocab=VOCAB + len(WORDS), context=CONTEXT)
    write_tokenizer(path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_tokens([AddedToken(word, special=True) for word in WORDS])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def filling(coder: Path) -> Iterator[Server]:
    with Server(model=coder) as running:
        yield running


def fill(server: Server, **fields: Any) -> Any:
    return server.post(
        COMPLETE, {"prompt": "the quick", "suffix": " dog", "max_tokens": 12, "temperature": 0, **fields}
    )


def test_the_middle_is_what_the_model_says_after_both_parts(filling: Server, coder: Path) -> None:
    llm = LLM(str(coder))
    encode, (prefix, suffix, middle, _) = llm.tokenizer.encode, map(llm.tokenizer.id, WORDS)
    ids = [prefix, *encode("the quick"), suffix, *encode(" dog"), middle]
    expected = llm.generate([ids], max_tokens=12)[0].text
    for prompt in ("the quick", encode("the quick")):
        said = fill(filling, prompt=prompt).json()
        assert said["choices"][0]["text"] == expected and said["usage"]["prompt_tokens"] == len(ids)
    plain = fill(filling, suffix="").json()
    assert plain["usage"]["prompt_tokens"] == len(encode("the quick")), "an empty suffix asks for nothing"
    client = filling.client()
    body: dict[str, Any] = {"model": "tiny", "suffix": " dog", "max_tokens": 12, "temperature": 0}
    chunks = client.completions.create(prompt="the quick", stream=True, **body)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    both = client.completions.create(prompt=["the quick", "a"], n=2, logprobs=1, **body)
    assert [choice.text for choice in both.choices[:2]] == [expected] * 2 and len(both.choices) == 4


@pytest.mark.parametrize("word", ["<|file_sep|>", "<|fim_middle|>", "<|im_end|>"])
def test_it_ends_with_the_file_or_another_part(filling: Server, coder: Path, word: str) -> None:
    token = Tokenizer.load(coder).id(word)
    choice = fill(filling, logit_bias={str(token): 100}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    if word != "<|im_end|>":
        assert (
            fill(filling, suffix=None, logit_bias={str(token): 100}).json()["choices"][0]["finish_reason"] == "length"
        )


@pytest.mark.parametrize("fields", [{"echo": True}, {"truncate_prompt_tokens": 5}, {"prompt_logprobs": 1}], ids=str)
def test_what_speaks_of_the_prompt_is_refused(filling: Server, fields: dict[str, Any]) -> None:
    assert failure(fill(filling, **fields), 400)["param"] == next(iter(fields))


def test_models_without_such_tokens_say_so(server: Server) -> None:
    error = failure(fill(server), 400)
    assert error["param"] == "suffix" and "<|fim_prefix|>" in error["message"]
    with pytest.raises(ApiError, match="no tokens"):
        Infill(Tokenizer.load(chat_checkpoint())).prompt("a", "b")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
def test_every_form_is_found_by_its_tokens(form: Any) -> None:
    words = [form.prefix, form.suffix, form.middle, *form.ends]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(["<unk>", "a", "b"])}, unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(words)
    infill = Infill(Tokenizer(backend))
    prefix, suffix, middle, *ends = map(backend.token_to_id, words)
    assert infill.prompt("a", "b") == [prefix, 1, suffix, 2, middle]
    assert set(infill.ends) == {prefix, suffix, middle, *ends}


def test_a_suffix_begins_with_no_space_of_its_own() -> None:
    """SentencePiece's tokenizers put a space before any text: Code Llama wants one before the prefix alone."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "\u2581", "a", "b", "\u263a"])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Replace("\u2581", " ")
    backend.add_special_tokens(["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"])
    tokens = [backend.id_to_token(i) for i in Infill(Tokenizer(backend)).prompt("a", "b a")]
    assert tokens == ["\u2581<PRE>", "\u2581", "a", "\u2581<SUF>", "b", "\u2581", "a", "\u2581<MID>"]
