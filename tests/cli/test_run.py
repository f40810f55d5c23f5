from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from phasewise.cli.run import Conversation
from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.cli.conftest import Cli
from tests.serve.tiny_chat import chat_checkpoint

MODEL = ("--model", str(chat_checkpoint()), "--kv-bytes", "64M")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(chat_checkpoint()))


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is piped in."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_prompt_is_continued(cli: Cli, llm: LLM) -> None:
    said = cli("run", "the quick brown", "--max-tokens", 12, *MODEL)
    assert said.code == 0 and said.err == ""
    assert said.out == llm.generate("the quick brown", Params(max_tokens=12))[0].text + "\n"


def test_a_prompt_may_be_piped(cli: Cli, llm: LLM, stdin: Any) -> None:
    stdin("the lazy\ndog\n")
    said = cli("run", "--max-tokens", 5, *MODEL)
    assert said.out == llm.generate("the lazy\ndog", Params(max_tokens=5))[0].text + "\n"


def test_an_empty_pipe_is_no_prompt(cli: Cli, stdin: Any) -> None:
    stdin("")
    said = cli("run", *MODEL)
    assert said.code == 2 and "the prompt on stdin is empty" in said.err


def test_methods_and_seeds_are_passed_on(cli: Cli, llm: LLM) -> None:
    words = ("run", "the fox", "--max-tokens", 10, "--temperature", 0.9)
    plain = cli(*words, "--seed", 7, *MODEL)
    assert plain.out == llm.generate("the fox", Params(max_tokens=10, temperature=0.9, seed=7))[0].text + "\n"
    assert cli(*words, "--seed", 8, *MODEL).out != plain.out
    drafted = cli("run", "fox fox fox fox", "--max-tokens", 10, "--draft", "prompt_lookup:k=3", *MODEL)
    assert drafted.out == cli("run", "fox fox fox fox", "--max-tokens", 10, *MODEL).out


def test_a_conversation_remembers(cli: Cli, llm: LLM, stdin: Any) -> None:
    stdin("hello\n\nand you?\n")
    said = cli("run", "--chat", "--max-tokens", 6, *MODEL)
    params, messages, expected = Params(max_tokens=6), [], ""
    for text in ("hello", "and you?"):
        messages.append({"role": "user", "content": text})
        answer = "".join(llm.stream(messages, params))
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert said.code == 0 and said.out == expected


def test_a_conversation_may_begin_with_the_argument(cli: Cli, llm: LLM, stdin: Any) -> None:
    stdin("")
    said = cli("run", "hello", "--chat", "--max-tokens", 4, *MODEL)
    assert said.out == llm.chat([{"role": "user", "content": "hello"}], Params(max_tokens=4)).text + "\n"


def test_a_long_conversation_forgets_its_oldest_turns(cli: Cli, stdin: Any) -> None:
    stdin("".join(f"{'fox dog ' * 120} {i}\n" for i in range(8)))  # each turn is a good part of the context
    said = cli("run", "--chat", "--max-tokens", 2, *MODEL)
    assert said.code == 0 and said.out.count("\n") >= 8
    assert "forgotten" in said.err


def test_it_forgets_where_a_method_reaches_less_than_the_context() -> None:
    """Augmentation keeps sixteen of the model's 2,048 positions for itself: a text that these would take goes."""
    llm = LLM("pocket", decode="augment")
    talk = Conversation(llm, Params(max_tokens=1))
    hello, length = {"role": "user", "content": "hello"}, 0
    words = "one " * (llm.model.config.max_positions - 100)
    while length < llm.engine.reach(""):
        words += "one "
        talk.messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "1"}]
        length = len(llm.encode_chat([*talk.messages, hello]))
    assert length + 1 <= llm.model.config.max_positions
    talk.say("hello")
    assert talk.messages[0] == hello and len(talk.messages) == 2


def test_ctrl_c_stops_an_answer_and_leaves_no_request(monkeypatch: pytest.MonkeyPatch, cli: Cli, stdin: Any) -> None:
    stream, engines = LLM.stream, []

    def interrupted(self: LLM, *given: Any, **more: Any) -> Iterator[str]:
        engines.append(self.engine)
        for i, piece in enumerate(stream(self, *given, **more)):
            yield piece
            if i == 1 and len(engines) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    stdin("one\ntwo\n")
    said = cli("run", "--chat", "--max-tokens", 30, *MODEL)
    assert said.code == 0 and len(engines) == 2  # the second question was still answered
    assert engines[0].idle
    engines.clear()
    assert cli("run", "one", "--max-tokens", 30, *MODEL).code == 130


@pytest.mark.thorough
def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    command = [sys.executable, "-m", "phasewise", "run", "the fox", "--max-tokens", "1500", *MODEL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(4)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.wait(60)
    assert "Traceback" not in errors, errors


def test_a_model_alone_begins_a_conversation(cli: Cli, llm: LLM, stdin: Any) -> None:
    stdin("hello\n")
    said = cli("run", chat_checkpoint(), "--max-tokens", 4, "--kv-bytes", "64M")
    assert said.out == llm.chat([{"role": "user", "content": "hello"}], Params(max_tokens=4)).text + "\n"
    said = cli("run", chat_checkpoint(), "the fox", "--max-tokens", 4, "--kv-bytes", "64M")
    assert said.out == llm.generate("the fox", Params(max_tokens=4))[0].text + "\n"


def test_a_file_that_is_not_there_is_no_prompt(cli: Cli) -> None:
    said = cli("run", "no/such.gguf")
    assert said.code == 2 and "there is no file no/such.gguf" in said.err
    said = cli("run", "the", "quick", "fox", *MODEL)
    assert said.code == 2 and "quote a prompt as one" in said.err


def test_a_model_that_cannot_chat_is_told_of_before_anything_is_typed(cli: Cli) -> None:
    model = chat_checkpoint(chat=False)
    said = cli("run", model, "--kv-bytes", "64M")
    assert said.code == 2 and "no chat template" in said.err and f"phasewise run {model} 'Once" in said.err
