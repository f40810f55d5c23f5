"""Recipes as the user writes them: words of the command line, a file, Python; and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise import catalog, recipes
from phasewise.cli import config
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.options import WITH_DRAFT, parse_recipes
from phasewise.request.params import Params
from tests.cli.conftest import Cli
from tests.serve.tiny_chat import chat_checkpoint


def test_words_become_recipes() -> None:
    given = ["fast=draft=prompt_lookup:k=6,min_match=3", "long=evict=streaming:window=60 store=int8; skip=all"]
    assert recipes.read(given) == {
        "fast": {"draft": "prompt_lookup:k=6,min_match=3"},
        "long": {"evict": "streaming:window=60", "store": "int8", "skip": "all"},
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["fast"], "not of the form NAME=VERB=METHOD"),
        (["fast=draft"], "not of the form NAME=VERB=METHOD"),
        (["fast="], "not of the form"),
        (["=draft=prompt_lookup"], "recipe '' is not a name"),
        (["a@b=draft=prompt_lookup"], "recipe 'a@b' is not a name"),
        (["default=draft=prompt_lookup"], "recipe 'default' is what requests get that name none"),
        (["fast=place=disaggregated"], "cannot have a place of its own, for it says where the engine's workers run"),
        (["fast=schedule=slo"], "cannot have a schedule of its own"),
        (["fast=drft=prompt_lookup"], "unknown verb 'drft'. Did you mean draft"),
        (["fast=draft=prompt_lokup"], "unknown draft method 'prompt_lokup'. Did you mean prompt_lookup"),
        (["fast=skip=all skip=all"], "names skip twice"),
        (["fast=skip=all", "fast=skip=all"], "there are two recipes 'fast'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(words: list[str], why: str) -> None:
    with pytest.raises(UserError) as error:
        recipes.read(words)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("given", "own", "made"),
    [
        ({}, {"draft": "prompt_lookup"}, {"draft": "prompt_lookup", "decode": "speculative"}),
        ({"draft": "prompt_lookup"}, {"decode": "autoregressive"}, {"decode": "autoregressive"}),
        ({"draft": "draft_model", "verify": "match"}, {"draft": "prompt_lookup"},
         {"draft": "prompt_lookup", "verify": "match"}),
        ({"decode": "contrastive"}, {"draft": "prompt_lookup"}, {"draft": "prompt_lookup", "decode": "speculative"}),
        ({"draft": "prompt_lookup", "verify": "match"}, {"draft": "none"}, {}),
        ({"draft": "none"}, {"draft": "prompt_lookup"}, {"draft": "prompt_lookup", "decode": "speculative"}),
        ({"evict": "snapkv", "schedule": "slo"}, {"evict": "none"}, {"evict": "none", "schedule": "slo"}),
        ({"draft": "prompt_lookup"}, {"evict": "snapkv"}, {"draft": "prompt_lookup", "evict": "snapkv"}),
        ({"store": "int8"}, {}, {"store": "int8"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_recipe_is_the_servers_own_but_for_what_it_names(
    given: dict[str, str], own: dict[str, str], made: dict[str, str]
) -> None:
    found = recipes.texts(given, own, WITH_DRAFT)
    assert {**WITH_DRAFT, **found} == {**WITH_DRAFT, **made} if "draft" in made else found == made
    parsed = parse_recipes(given, {"mine": own})["mine"]
    for verb, text in made.items():
        assert type(parsed[verb]) is catalog.method(verb, text)


def test_a_recipe_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match="recipe 'odd': decode autoregressive does not use --draft"):
        parse_recipes({}, {"odd": {"decode": "autoregressive", "draft": "prompt_lookup"}})
    with pytest.raises(UserError, match="recipe 'odd': draft prompt_lookup has no knob 'kk'"):
        parse_recipes({}, {"odd": {"draft": "prompt_lookup:kk=3"}})


# ---- files
def write(path: Path, text: str) -> Path:
    file = path / "phasewise.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('prot = 3', "unknown option 'prot'. Did you mean port"),
        ('recipe = "x"', "unknown option 'recipe'. Did you mean recipes"),
        ('config = "x"', "unknown option 'config'"),
        ("port = [1]", "port = [1] is not a value of an option"),
        ("port = 99999", "--port"),
        ('port = "many"', "--port"),
        ("port = ", "is not TOML"),
        ('[recipe.fast]\ndraft = "prompt_lookup"', "unknown option 'recipe'. Did you mean recipes"),
        ('[recipes.fast]\ndrft = "prompt_lookup"', "unknown verb 'drft'. Did you mean draft"),
        ("[recipes.fast]\ndraft = 3", "draft = 3 of recipe 'fast' must be text"),
        ("recipes = 3", "recipes must be tables"),
        ('[recipes.fast]\nschedule = "slo"', "cannot have a schedule of its own"),
        ('evict = "snapvk"', "unknown evict method 'snapvk'. Did you mean snapkv"),
        ('kv-bytes = "lots"', "'lots' is not a size"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_in_a_file(cli: Cli, tmp_path: Path, text: str, why: str) -> None:
    said = cli("serve", "--config", write(tmp_path, text))
    assert said.code == 2 and why in said.err, said.err


def test_a_file_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    said = cli("serve", "--config", tmp_path / "none.toml")
    assert said.code == 2 and "none.toml cannot be read: No such file" in said.err


def test_the_command_line_wins(cli: Cli, tmp_path: Path) -> None:
    """Seen by what is complained of: the file's own value is never looked at."""
    file = write(tmp_path, 'evict = "wrong"\nmax-running = 3\n')
    assert "unknown evict method 'worse'" in cli("serve", "--config", file, "--evict", "worse").err
    assert "unknown evict method 'worse'" in cli("serve", "--evict", "worse", "--config", file).err
    assert "unknown evict method 'wrong'" in cli("serve", "--config", file).err


def test_the_files_recipes(tmp_path: Path) -> None:
    file = write(
        tmp_path, 'port = 1\n[recipes.fast]\ndraft = "prompt_lookup:k=6"\n[recipes.long]\nevict = "streaming"\n'
    )
    assert config.recipes_of(file) == {"fast": {"draft": "prompt_lookup:k=6"}, "long": {"evict": "streaming"}}
    assert config.recipes_of(None) == {}


# ---- Python
def test_offline_requests_pick_recipes() -> None:
    name, own = str(chat_checkpoint()), {"evict": "streaming:sinks=2,window=30"}
    params, prompt = Params(max_tokens=16, ignore_eos=True), "the quick brown fox jumps over " * 5
    llm, long = LLM(name, recipes={"long": own}), LLM(name, **own)
    both = llm.generate([prompt, prompt], params, recipe=["", "long"])
    want = [LLM(name).generate(prompt, params)[0].text, long.generate(prompt, params)[0].text]
    assert [output.text for output in both] == want and want[0] != want[1]
    assert llm.generate(prompt, params, recipe="long")[0].text == want[1]
    assert "".join(llm.stream(prompt, params, recipe="long")) == want[1]
    talk = [{"role": "user", "content": prompt}]
    assert llm.chat(talk, params, recipe="long").text == long.chat(talk, params).text
    with pytest.raises(UserError, match="unknown recipe 'lang'. Did you mean long"):
        llm.generate(prompt, params, recipe="lang")
    with pytest.raises(UserError, match="1 recipes for 2 prompts"):
        llm.generate([prompt, prompt], params, recipe=["long"])
    assert llm.engine.idle
