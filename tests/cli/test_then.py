"""Drafts beside decode methods for prompts alone: from options and recipes to methods, and back."""

from __future__ import annotations

import pytest

from phasewise import catalog
from phasewise.cluster import recipe_update
from phasewise.errors import UserError
from phasewise.options import lossy, parse, parse_recipes, spell
from tests.cli.conftest import Cli

HANDING = [name for name in catalog.names("decode") if catalog.THEN in catalog.parts_of(catalog.method("decode", name))]
SHORT = "speculative:draft=(prompt_lookup:k=6),verify=(rejection)"


def decode(**options: str) -> str:
    return spell(parse(options))["decode"]


def test_these_hand_on() -> None:
    assert HANDING == ["augment", "c2c", "kv_prediction", "pie"]


@pytest.mark.parametrize("name", HANDING)
def test_a_drafter_by_itself_is_the_short_way(name: str) -> None:
    long = f"{name}:then=({SHORT})"
    for given in (
        {"decode": name, "draft": "prompt_lookup:k=6"}, {"decode": long},
        {"decode": f"{name}:then=(speculative:draft=(prompt_lookup:k=6))"},
        {"decode": f"{name}:then=speculative", "draft": "prompt_lookup:k=6"},
        {"decode": f"{name}:then=speculative,then.draft=prompt_lookup,then.draft.k=6"},
        {"decode": f"{name}:then=(speculative:draft=(prompt_lookup:k=6))", "verify": "rejection"},
    ):  # fmt: skip
        methods = parse(given)
        assert spell(methods)["decode"] == long and parse(spell(methods)) == methods
        then = methods["decode"].then
        assert methods["draft"] is then.draft and methods["verify"] is then.verify
    assert decode(decode=name, draft="prompt_lookup", verify="match").endswith("verify=(match))")
    assert decode(decode=name, draft="none") == decode(decode=name) == name
    assert not {"draft", "verify"} & parse({"decode": name}).keys()


@pytest.mark.parametrize(("given", "said"), [
    ({"decode": "c2c", "verify": "match"}, "decode c2c does not use --verify match: leave one of them out"),
    ({"decode": "c2c:then=contrastive", "draft": "prompt_lookup"}, "decode c2c does not use --draft prompt_lookup"),
    ({"decode": "c2c:then=(speculative:draft=swift)", "draft": "prompt_lookup"}, "then: draft is given twice"),
    ({"decode": "c2c:then=speculative"}, "decode c2c: then speculative needs a draft: add draft=.NAME.. Valid: .*"),
    ({"decode": "pie:then=speculative:draft=swift"}, "a method with knobs stands in parentheses, .speculative:draft=s"),
    ({"decode": "pie", "draft": "prompt_lookup:kk=3"}, "draft prompt_lookup has no knob 'kk'. Did you mean k?"),
])  # fmt: skip
def test_mistakes_are_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(given)


@pytest.mark.parametrize(("server", "own", "want"), [
    ({"decode": "c2c"}, {"draft": "prompt_lookup:k=6"}, f"c2c:then=({SHORT})"),
    ({"decode": "c2c", "draft": "prompt_lookup:k=6"}, {"store": "int8"}, f"c2c:then=({SHORT})"),
    ({"decode": "c2c", "draft": "prompt_lookup:k=6"}, {"draft": "none"}, "c2c"),
    ({"draft": "prompt_lookup:k=6"}, {"decode": "pie"}, f"pie:then=({SHORT})"),
    ({"draft": "prompt_lookup:k=6"}, {"decode": "pie", "draft": "none"}, "pie"),
    ({"draft": "prompt_lookup:k=6"}, {"decode": "pie:then=contrastive"}, "pie:then=(contrastive)"),
    ({"draft": "prompt_lookup:k=6"}, {"decode": "autoregressive"}, "autoregressive"),
    ({"decode": "speculative:draft=swift", "verify": "match"}, {"decode": "pie"}, "pie"),
    ({"decode": "contrastive"}, {"draft": "prompt_lookup:k=6"}, SHORT),
])  # fmt: skip
def test_recipes(server: dict[str, str], own: dict[str, str], want: str) -> None:
    parsed = parse_recipes(server, {"mine": own})
    assert spell(parsed["mine"])["decode"] == want
    told = recipe_update.read(recipe_update.told(parsed))
    assert told == parsed and parse(spell(parsed["mine"])) == parsed["mine"]
    if "draft" in told["mine"]:
        assert told["mine"]["draft"] is catalog.filled(told["mine"]["decode"])["draft"]


def test_what_follows_may_be_lossy_or_leave_its_first_neutral() -> None:
    assert lossy(parse({"decode": "pie", "draft": "prompt_lookup"})) == []
    assert lossy(parse({"decode": "c2c:gates=closed", "draft": "prompt_lookup"})) == []
    assert lossy(parse({"decode": "augment:latents=0,then=contrastive"})) == [
        "decode=contrastive (or say contrastive:alpha=0.0,beta=0.0)"
    ]
    (found,) = lossy(parse({"decode": "c2c", "draft": "prompt_lookup:k=6"}))
    assert found == f"decode=c2c (or say c2c:gates=closed,then=({SHORT}))"
    assert lossy(parse({"decode": "pie", "draft": "prompt_lookup", "verify": "top_beta"}))[0].startswith("verify=top_b")


@pytest.mark.parametrize(("words", "said"), [
    (("--decode", "c2c:then=pie"), "c2c: then=pie acts on prompts as well: choose one for what follows the prompt"),
    (("--decode", "pie:then=block_diffusion"), "pie: then=block_diffusion computes prompts in a way of its own"),
    (("--decode", "augment:then=nobody"), "unknown decode method 'nobody'"),
    (("--decode", "kv_prediction:then=contrastive", "--draft", "prompt_lookup"), "does not use --draft"),
    (("--decode", "pie", "--draft", "prompt_lookup", "--verify", "top_beta", "--exact"), "--verify top_beta"),
])  # fmt: skip
def test_the_command_line_exits_with_two(cli: Cli, words: tuple[str, ...], said: str) -> None:
    found = cli("run", "x", *words)
    assert found.code == 2 and said in " ".join(found.err.split())


def test_it_runs(cli: Cli) -> None:
    words = ("run", "def f(x):\n    return x\n\ndef f(", "--max-tokens", 8, "--kv-bytes", "64M", "--decode")
    plain, short, long = (
        cli(*words, *more) for more in (("pie",), ("pie", "--draft", "prompt_lookup"), (f"pie:then=({SHORT})",))
    )
    assert plain.code == short.code == long.code == 0 and plain.out == short.out == long.out
