"""`--exact`: what may change answers is refused by name, wherever methods are chosen; what cannot passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise import catalog
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.options import lossy, parse, parse_recipes, refuse_lossy
from tests import tiny
from tests.cli.conftest import Cli
from tests.serve.tiny_chat import chat_checkpoint

LOSSY = [(verb, name) for verb, name, cls in catalog.every() if cls.guarantee == "lossy"]
OTHERS = [(verb, name) for verb, name, cls in catalog.every() if cls.guarantee != "lossy"]


def chosen(verb: str, text: str) -> dict[str, str]:
    return {verb: text} | ({"draft": "prompt_lookup"} if verb == "verify" else {})


@pytest.mark.parametrize(("verb", "name"), LOSSY)
def test_every_lossy_method_is_refused_unless_it_is_neutral(verb: str, name: str) -> None:
    cls = catalog.method(verb, name)
    neutral = catalog.spell(verb, cls(**cls.neutral))
    assert lossy(parse(chosen(verb, name))) == [f"{verb}={name} (or say {neutral})"]
    assert lossy(parse(chosen(verb, neutral))) == []
    with pytest.raises(UserError, match=f"leave out --{verb} {name} "):
        refuse_lossy({"": parse(chosen(verb, name))})


def test_every_other_method_passes() -> None:
    assert len(OTHERS) > 20
    for verb, name in OTHERS:
        slots = catalog.slots_of(catalog.method(verb, name)) if verb == "decode" else []
        refuse_lossy({"": parse(chosen(verb, name) | ({"draft": "prompt_lookup"} if "draft" in slots else {}))})


def test_a_knob_beside_the_neutral_ones_makes_no_promise() -> None:
    """Neutral is what a method says of itself with all else as by default; that much has been tested."""
    assert lossy(parse({"evict": "snapkv:keep=1.0"})) == []
    assert lossy(parse({"evict": "snapkv:keep=0.5"})) and lossy(parse({"evict": "snapkv:keep=1.0,window=3"}))


def test_a_method_of_several_slots_is_named_once() -> None:
    """By its own verb, whose option chose it."""
    several = [(verb, name) for verb, name in LOSSY if catalog.method(verb, name)().traits.fills]
    assert len(several) > 2
    for verb, name in [*several, ("store", "cachegen:rest=zipcache")]:
        assert len(lossy(parse({verb: name}))) == 1


def test_recipes_are_named_with_what_is_their_own() -> None:
    server = {"store": "int8"}
    recipes = parse_recipes(server, {"long": {"evict": "streaming"}, "fast": {"draft": "prompt_lookup"}})
    with pytest.raises(UserError) as error:
        refuse_lossy({"": parse(server), **recipes})
    said = str(error.value)
    assert said.count("leave out") == 2 and "leave out --store int8 (or say int8:bits=16)" in said
    assert "leave out evict=streaming" in said and said.endswith("of recipe 'long'")
    refuse_lossy({"": parse({}), "fast": recipes["fast"] | {"store": parse({})["store"]}})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("run", "x", "--evict", "snapkv", "--draft", "prompt_lookup", "--verify", "top_beta"), ("snapkv", "top_beta")),
        (("run", "x", "--decode", "speculative:draft=(prompt_lookup),verify=top_beta"), ("--verify top_beta",)),
        (("serve", "--model", "pocket", "--recipe", "long=evict=streaming"), ("recipe 'long'", "evict=streaming")),
        (("bench", "offline", "--store", "int8"), ("--store int8",)),
        (("bench", "draft", "prompt_lookup", "--verify", "top_beta"), ("--verify top_beta",)),
        (("eval", "--skip", "unified:speedup=2"), ("--skip unified",)),
    ],
)
def test_the_command_line_exits_with_two(cli: Cli, words: tuple[str, ...], named: tuple[str, ...]) -> None:
    said = cli(*words, "--exact")
    assert said.code == 2 and "exact refuses what may change answers: leave out" in said.err
    assert all(name in said.err for name in named)


def test_a_file_may_ask_for_it(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "exact.toml"
    path.write_text('model = "pocket"\nexact = true\n[recipes.long]\nevict = "streaming"\n')
    said = cli("serve", "--config", path)
    assert said.code == 2 and "evict=streaming" in said.err and "of recipe 'long'" in said.err


def test_drafters_are_measured_under_an_exact_verifier(cli: Cli) -> None:
    words = ("--verify", "match", "--exact", "--tokens", 4, "--per-task", 1, "--batch", 1, "--kv-bytes", "64M")
    said = cli("bench", "draft", "prompt_lookup", *words)
    assert said.code == 0 and "| prompt_lookup |" in said.out


def test_what_is_exact_runs(cli: Cli) -> None:
    words = ("run", "def f(", "--max-tokens", 6, "--kv-bytes", "64M")
    plain = cli(*words)
    exact = cli(*words, "--exact", "--draft", "prompt_lookup", "--evict", "snapkv:keep=1.0")
    assert exact.code == plain.code == 0 and exact.out == plain.out


def test_in_python_and_for_workers() -> None:
    model, limits = str(chat_checkpoint()), Limits(kv_bytes=32 << 20, exact=True)
    with pytest.raises(UserError, match=r"leave out --evict snapkv \(or say snapkv:keep=1\.0\)"):
        LLM(model, limits=limits, evict="snapkv")
    with pytest.raises(UserError, match="of recipe 'small'"):
        LLM(model, limits=limits, recipes={"small": {"store": "int8"}})
    llm = LLM(model, limits=limits, draft="prompt_lookup")
    assert len(llm.generate(["the quick"], max_tokens=3)[0].tokens) <= 3
    spec = EngineSpec(model, limits)
    assert EngineSpec.of(spec.plain()) == spec and spec.plain()["limits"]["exact"]


def test_a_lossy_verifier_over_a_shared_table_is_refused_as_well() -> None:
    """Also where nobody asks for exactness: there tokens of one request would hang on those of others."""
    with pytest.raises(UserError, match=r"learns from all requests.*top_beta.*scope=request"):
        tiny.engine({"draft": "token_recycling:scope=engine", "verify": "top_beta"})
