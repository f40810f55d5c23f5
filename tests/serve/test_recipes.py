"""Recipes over HTTP: a model's name says which methods answer, from the command line or from a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import PATIENCE, Server, launch
from tests.serve.tiny_chat import chat_checkpoint

RECIPES = {"fast": {"draft": "prompt_lookup:k=4"}, "long": {"evict": "streaming:sinks=2,window=30"}}
PROMPT = "the quick brown fox jumps over the lazy dog and then the other thing " * 3
NAMES = ["tiny", "tiny@fast", "tiny@long"]


@pytest.fixture(scope="module")
def many() -> Iterator[Server]:
    with Server(recipes=RECIPES) as running:
        yield running


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    """What each name gives in an engine that knows nothing else."""
    found = {}
    for name, verbs in zip(NAMES, ({}, *RECIPES.values())):
        llm = LLM(str(chat_checkpoint()), **verbs)
        found[name] = llm.generate([PROMPT], Params(max_tokens=24, ignore_eos=True))[0].text
    return found


def complete(client: openai.OpenAI, name: str) -> str:
    done = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.model == name
    return str(done.choices[0].text)


def test_the_models_are_listed(many: Server) -> None:
    client = many.client()
    assert [model.id for model in client.models.list()] == NAMES
    assert [client.models.retrieve(name).id for name in NAMES] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_name_picks_the_recipe(many: Server, wanted: dict[str, str], name: str) -> None:
    client = many.client()
    assert complete(client, name) == wanted[name]
    assert wanted["tiny@long"] != wanted["tiny"] == wanted["tiny@fast"], "the recipes cannot be told apart"
    stream = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=24, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == wanted[name]
    assert {chunk.model for chunk in chunks} == {name}


def test_chat_and_samples_have_recipes_too(many: Server) -> None:
    client = many.client()
    said = client.chat.completions.create(
        model="tiny@fast", messages=[{"role": "user", "content": PROMPT}], max_tokens=8, n=3, seed=1
    )
    assert said.model == "tiny@fast" and len(said.choices) == 3


@pytest.mark.parametrize("name", ["tiny@fsat", "tiny@", "@fast", "tiny@fast@fast", "fast", "tiny@default"])
def test_an_unknown_recipe_is_not_found(many: Server, name: str) -> None:
    client = many.client()
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, name)
    body = caught.value.body
    assert isinstance(body, dict) and body["code"] == "model_not_found" and body["param"] == "model"
    assert "Valid: tiny, tiny@fast, tiny@long." in body["message"]
    if name == "tiny@fsat":
        assert "Did you mean tiny@fast" in body["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)


def test_metrics_are_told_apart(many: Server) -> None:
    client, before = many.client(), many.settled()
    for name, count in zip(NAMES, (1, 2, 3)):
        for _ in range(count):
            complete(client, name)
    after = many.settled()
    tokens = len(LLM(str(chat_checkpoint())).encode(PROMPT))
    for label, count in (("default", 1), ("fast", 2), ("long", 3)):
        recipe = f'{{recipe="{label}"}}'
        for name, grown in {
            "requests_accepted_total": count, "prompt_tokens_total": count * tokens, "output_tokens_total": count * 24,
            "time_to_first_token_seconds_count": count, "time_per_output_token_seconds_count": count,
        }.items():  # fmt: skip
            name = f"phasewise_{name}{recipe}"
            assert after[name] - before[name] == grown, name
        left = f'phasewise_requests_total{{how="length",recipe="{label}"}}'
        assert after[left] - before.get(left, 0) == count
    assert after["phasewise_drafted_total"] > before["phasewise_drafted_total"]
    of = {label: {name: after[key] - before[key] for name in ("rows", "drafted", "accepted")
                  for key in [f'phasewise_recipe_{name}_total{{recipe="{label}"}}']}
          for label in ("default", "fast", "long")}  # fmt: skip
    assert of["fast"]["drafted"] == after["phasewise_drafted_total"] - before["phasewise_drafted_total"] > 0
    assert of["fast"]["accepted"] == after["phasewise_accepted_total"] - before["phasewise_accepted_total"]
    assert of["default"]["drafted"] == of["long"]["drafted"] == 0
    rows = after["phasewise_rows_total"] - before["phasewise_rows_total"]
    assert sum(own["rows"] for own in of.values()) == rows and of["long"]["rows"] > of["default"]["rows"]


def test_without_recipes_nothing_is_labelled(server: Server) -> None:
    assert not [name for name in server.metrics() if "recipe" in name]


def test_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "phasewise.toml"
    file.write_text(
        f'model = "{chat_checkpoint()}"\nport = 1\nkv-bytes = "64M"\nno_prefix_cache = true\n'
        '[recipes.fast]\ndraft = "prompt_lookup:k=2"\n[recipes.long]\nevict = "streaming"\n'
    )
    process = launch("serve", "--config", str(file), "--port", "0", "--recipe", "fast=skip=all")
    try:
        banner = process.stdout.readline()
        found = re.search(r"http://[^ ]+", banner)
        assert found is not None, process.communicate(timeout=PATIENCE)
        client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        name = chat_checkpoint().name
        assert [model.id for model in client.models.list()] == [name, f"{name}@fast", f"{name}@long"]
        assert client.completions.create(model=f"{name}@long", prompt="the", max_tokens=2).usage is not None
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def test_a_request_may_refuse_what_changes_answers(many: Server, wanted: dict[str, str]) -> None:
    """`exact`, in both endpoints: a lossy recipe is refused with what is lossy of it, and who would do."""
    client = many.client()
    told = {"ignore_eos": True, "exact": True}
    for name in ("tiny", "tiny@fast"):
        done = client.completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=told)
        assert done.choices[0].text == wanted[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny@long", prompt=PROMPT, max_tokens=2, extra_body=told)
    body = caught.value.body
    assert isinstance(body, dict) and body["param"] == "exact"
    assert "evict=streaming" in body["message"] and "ask for tiny or tiny@fast, or leave exact out" in body["message"]
    with pytest.raises(openai.BadRequestError, match="evict=streaming"):
        client.chat.completions.create(
            model="tiny@long", messages=[{"role": "user", "content": "x"}], extra_body={"exact": True}
        )
    with pytest.raises(openai.BadRequestError, match="exact"):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, extra_body={"exact": "yes"})
    client.completions.create(model="tiny@long", prompt=PROMPT, max_tokens=2, extra_body={"exact": False})
