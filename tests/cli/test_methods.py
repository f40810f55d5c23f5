from __future__ import annotations

import pytest

from phasewise import catalog
from phasewise.cli.methods import entries, markdown
from phasewise.errors import UserError
from phasewise.options import DEFAULTS, parse
from tests.cli.conftest import Cli
from tests.seeds import draw


def test_the_table_has_every_verb_and_method(cli: Cli) -> None:
    out = cli("methods").out
    for verb, name, method in catalog.every():
        assert f"{verb}  {catalog.QUESTIONS[verb]}" in out
        assert f"  {name}" in out and method.guarantee in out and method.paper in out
    assert f"{DEFAULTS['schedule']} *" in out


def test_one_verb(cli: Cli) -> None:
    out = cli("methods", "evict").out
    assert "snapkv" in out and "keep=0.25" in out and "sarathi" not in out


@pytest.mark.parametrize(
    ("verb", "name"), draw(__name__).sample([(verb, name) for verb, name, _ in catalog.every()], 12)
)
def test_every_method_has_details(cli: Cli, verb: str, name: str) -> None:
    said = cli("methods", f"{verb}.{name}")
    assert said.code == 0
    method = catalog.method(verb, name)
    text = " ".join(said.out.split())
    assert f"--{verb} {name}" in text and f"guarantee {method.guarantee}" in text
    assert " ".join((method.__doc__ or "").split())[:40] in text
    for knob in catalog.knobs_of(method):
        assert f"knob {knob}: " in text
    for field, part in catalog.parts_of(method).items():
        for choice in catalog.names(part.kind) if field in catalog.knobs_of(method) and "." in part.kind else ():
            assert f"part {field}={choice}" in text
            for inner in catalog.knobs_of(catalog.method(part.kind, choice)):
                assert f"{field}={choice}," in text and f",{field}.{inner}=" in text


FOLDERS = [kind for verb in catalog.VERBS for kind in catalog.folders(verb)]


def test_parts_have_a_table_and_details(cli: Cli) -> None:
    assert "decode.selector" in FOLDERS
    out = " ".join(cli("methods", "decode.selector").out.split())
    assert "parts of block_diffusion:selector=..." in out and "radius=4" in out and "autoregressive" not in out
    for name in catalog.names("decode.selector"):
        said = " ".join(cli("methods", f"decode.selector.{name}").out.split())
        assert f"use --decode block_diffusion:selector={name}" in said
        assert " ".join((catalog.method("decode.selector", name).__doc__ or "").split())[:40] in said


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("decode.selector.dynamik", "unknown selector 'dynamik'. Did you mean dynamic?"),
        ("decode.selektor", "unknown decode method 'selektor'"),
        ("dekode.selector", "unknown verb 'dekode'"),
        ("dekode", "unknown verb 'dekode'. Did you mean decode?"),
    ],
)
def test_what_is_not_there_is_said(cli: Cli, which: str, why: str) -> None:
    said = cli("methods", which)
    assert said.code == 2 and why in said.err


def test_what_cannot_run_alone_says_so(cli: Cli) -> None:
    """Whoever needs a method of another verb that has no default is refused without it, and its row names the verb."""
    for entry in entries("decode"):
        open_slots = [verb for verb in catalog.slots_of(entry.method) if verb not in DEFAULTS]
        assert all(f"a {verb} method" in entry.needs for verb in open_slots)
        if open_slots:
            with pytest.raises(UserError, match=f"add --{open_slots[0]}"):
                parse({"decode": entry.name})
    [speculative] = [entry for entry in entries("decode") if entry.name == "speculative"]
    assert speculative.needs == "a draft method" and "needs a draft method" in cli("methods", "decode").out


def test_the_example_of_use_can_be_used() -> None:
    for entry in entries():
        if entry.knobs and not catalog.slots_of(entry.method):
            built = catalog.build(entry.kind, f"{entry.name}:{entry.knobs.replace(', ', ',')}")
            assert built == entry.method(), f"{entry.kind}.{entry.name}"


def test_markdown_has_a_row_per_method() -> None:
    lines = markdown().splitlines()
    assert len(lines) == 2 + len(list(catalog.every()))
    assert all(line.count("|") - line.count("\\|") == 8 for line in lines)
