from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from phasewise import catalog
from phasewise.cli.options import DEFAULTS, EngineOptions, parse_bytes, spread
from phasewise.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123", 123),
        ("4K", 4096),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("8 MB", 8 << 20),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "M", "1X", "1e9", "two"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a size"):
        parse_bytes(text)


def test_every_verb_has_an_option() -> None:
    assert set(catalog.VERBS) <= set(EngineOptions.__dataclass_fields__)


def floats() -> list[tuple[str, str, str]]:
    kinds = [kind for verb in catalog.VERBS for kind in (verb, *catalog.folders(verb))]
    classes = [(kind, name, catalog.method(kind, name)) for kind in kinds for name in catalog.names(kind)]
    return [
        (kind, name, knob)
        for kind, name, cls in classes
        for knob, held in catalog.knobs_of(cls).items()
        if held is float or float in typing.get_args(held)
    ]


def test_methods_have_knobs_that_are_floats() -> None:
    assert len(floats()) > 40 and {kind for kind, _, _ in floats()} >= {"place", "decode.selector", "evict", "sample"}


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e999"])
@pytest.mark.parametrize(("kind", "name", "knob"), floats())
def test_a_knob_is_a_finite_number(kind: str, name: str, knob: str, text: str) -> None:
    with pytest.raises(UserError, match=f"^{kind} {name}: knob {knob}='{text}' is not a finite number: choose one"):
        catalog.build(kind, f"{name}:{knob}={text}")


def test_options_become_limits() -> None:
    limits = EngineOptions(kv_bytes="1M", max_running=3, no_prefix_cache=True, cluster="processes").limits()
    assert (limits.kv_bytes, limits.max_running, limits.prefix_cache) == (1 << 20, 3, False)
    assert limits.cluster == "processes" and DEFAULTS.limits().cluster == "auto"
    assert DEFAULTS.limits().kv_bytes is None and DEFAULTS.limits().prefix_cache


def test_arguments_are_the_options_again() -> None:
    assert DEFAULTS.arguments() == []
    options = EngineOptions(model="m", max_running=3, no_prefix_cache=True, draft="prompt_lookup:k=2")
    words = options.arguments()
    assert words == ["--model", "m", "--max-running", "3", "--no-prefix-cache", "--draft", "prompt_lookup:k=2"]
    seen: list[EngineOptions] = []
    app = typer.Typer()

    @app.command()
    @spread
    def command(engine: EngineOptions = DEFAULTS) -> None:
        seen.append(engine)

    assert CliRunner().invoke(app, words).exit_code == 0
    assert seen == [options]


def test_spread_replaces_groups_by_their_fields() -> None:
    @dataclass(frozen=True)
    class Size:
        width: Annotated[int, typer.Option(min=1)] = 3
        height: int = 4

    def area(scale: int, size: Size = Size(), name: str = "x") -> str:
        return f"{name}{scale * size.width * size.height}"

    spread_area = spread(_resolved(area, Size))
    assert list(inspect.signature(spread_area).parameters) == ["scale", "width", "height", "name"]
    assert spread_area(scale=2, width=5, height=1, name="a") == "a10"


def _resolved(function, group):  # type: ignore[no-untyped-def]
    """A local class cannot be looked up by name: put the class itself into the annotations."""
    function.__annotations__["size"] = group
    return function
