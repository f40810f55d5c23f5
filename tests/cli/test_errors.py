"""Whatever the user gets wrong, the answer is one line on stderr, exit status 2, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.serve.tiny_chat import chat_checkpoint


def refused(cli: Cli, *words: object) -> str:
    said = cli(*words)
    assert said.code == 2, said
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run x --evict snapkw", "Did you mean snapkv"),
        ("run x --evict snapkv:kep=1", "Did you mean keep"),
        ("run x --evict snapkv:keep=much", "'much'"),
        ("run x --evict snapkv:keep=inf", "evict snapkv: knob keep='inf' is not a finite number: choose one that is"),
        ("run x --evict tova:keep=1.5", "tova: keep=1.5: above 1 it is a number of rows, which 1.5 is not: say 2"),
        ("serve --schedule sarathi:budget", "knob=value"),
        ("run x --verify match", "does not use --verify"),
        ("run x --kv-bytes 3Q", "'3Q' is not a size"),
        ("run x --kv-bytes 0", "'0' is not a size"),
        ("run x --device gpu", "'gpu' cannot be used"),
        ("bench savers --device cuda", "of this machine's processor: leave --device out"),
        ("profile --device cuda", "of this machine's processor: leave --device out"),
        ("run x --max-tokens few", "--max-tokens"),
        ("run x --temperature -1", "--temperature"),
        ("run x --max-running 0", "--max-running"),
        ("serve --port 70000", "--port"),
        ("run x --bogus", "No such option: --bogus"),
        ("servee", "No such command 'servee'"),
        ("methods evcit", "Did you mean evict"),
        ("methods evict.snapkw", "Did you mean snapkv"),
        ("eval cpoy", "Did you mean copy"),
        ("eval code@8k", "code@8k needs a context of 8,192 tokens"),
        ("eval agreement", "--prompts FILE"),
        ("eval agreement --prompts nowhere.jsonl", "cannot be read"),
        ("train pocket", "--out"),
        ("train pocket --out x --size giant", "choose one of target, draft"),
        ("train pocket --out x --resume", "nothing to resume"),
        ("train tools", "--out"),
        ("train tools --out x --resume", "nothing to resume"),
        ("eval calculator --examples 1", "shows none: --model pocket-tools"),
        ("bench offline --workload fixd", "Did you mean fixed"),
        ("bench offline --prompts nowhere.txt", "say random, code"),
        ("bench load --rate 0", "rate=0 is not a rate"),
        ("bench load --url http://127.0.0.1:1 --requests 1", "no OpenAI-compatible server"),
        ("bench load --url http://127.0.0.1:1 --draft prompt_lookup", "leave --draft out"),
        ("bench methods evict", "not a setting"),
        ("bench compare --peer vlm", "unknown peer"),
        ("bench compare --tests decod1", "decodeB"),
        ("bench compare default", "is only one contender"),
        ("bench compare default http://127.0.0.1:1 --requests 1", "no OpenAI-compatible server answers at http://127"),
        ("bench goodput draft=paced --rates 1 --precision 0.1", "two rates to begin with"),
        ("bench goodput draft=paced --rates 1,2 --precision 9", "between 0.01 and 1"),
    ],
)
def test_mistakes_are_named_in_one_line(cli: Cli, words: str, says: str) -> None:
    given = words.split()
    if given[0] in ("run", "bench", "serve", "eval") and "--url" not in given:
        given += ["--model", str(chat_checkpoint())]
    assert says in refused(cli, *given)


@pytest.mark.parametrize(
    "command", ["run x", "serve --port 0", "eval copy", "bench offline", "bench methods", "bench compare"]
)
def test_a_missing_model_is_named(cli: Cli, command: str) -> None:
    assert "'/no/such/model'" in refused(cli, *command.split(), "--model", "/no/such/model")


def test_a_directory_that_is_no_checkpoint_is_named(cli: Cli, tmp_path: Path) -> None:
    assert "config.json" in refused(cli, "run", "x", "--model", tmp_path)


def test_unknown_types_are_named(cli: Cli) -> None:
    assert "unknown dtype 'int4'" in refused(cli, "run", "x", "--model", chat_checkpoint(), "--dtype", "int4")


def test_a_prompt_that_is_too_long_is_named(cli: Cli) -> None:
    assert "shorten it" in refused(cli, "run", "fox " * 3000, "--model", chat_checkpoint())
