"""Which kernels are taken: the best that the processor runs, unless the environment names others."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phasewise.errors import UserError
from phasewise.ops import native


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def cpu() -> str:
    """What /proc/cpuinfo says; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").lower()
    except OSError:
        return ""


def runs(target: str) -> bool:
    return native.load(target) is not None


def taken() -> str | None:
    """The file of the kernels in use."""
    kernels = native.library()
    return None if kernels is None else Path(kernels._name).name


def test_the_best_that_the_processor_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.CHOICE, raising=False)
    here = {target: native.load(target) for target in native.TARGETS}
    best = next((target for target, kernels in here.items() if kernels is not None and kernels.suits()), None)
    name = taken()
    assert name is None if best is None else name == f"_{best}.so"


def test_kernels_that_do_not_suit_the_processor_are_taken_on_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    here = native.TARGETS[1:3]
    found = {name: SimpleNamespace(_name=f"_{name}.so", suits=lambda name=name: name == here[1]) for name in here}
    monkeypatch.setattr(native, "load", found.get)
    monkeypatch.setattr(native, "_share_threads", lambda kernels: True)
    monkeypatch.delenv(native.CHOICE, raising=False)
    assert taken() == f"_{here[1]}.so"
    native.library.cache_clear()
    monkeypatch.setenv(native.CHOICE, here[0])
    assert taken() == f"_{here[0]}.so"


@pytest.mark.skipif(
    "genuineintel" not in cpu(), reason="on Intel's processors alone products of float32 are the faster ones"
)
def test_widened_products_suit_intels_processors() -> None:
    for target in native.TARGETS:
        kernels = native.load(target)
        assert kernels is None or kernels.suits()


@pytest.mark.skipif("authenticamd" not in cpu(), reason="AMD's keep the instructions for bfloat16")
def test_widened_products_do_not_suit_amds() -> None:
    for target in native.TARGETS:
        kernels = native.load(target)
        assert kernels is None or bool(kernels.suits()) == (target != "avx512_fma")


@pytest.mark.parametrize("target", native.TARGETS)
def test_the_environment_names_another(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setenv(native.CHOICE, target)
    if runs(target):
        assert taken() == f"_{target}.so"
    else:
        with pytest.raises(UserError, match=f"{native.CHOICE}={target}.*built"):
            native.library()


def test_none_is_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(native.CHOICE, "none")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert f"{native.CHOICE}=none" in caplog.text


def test_an_unknown_name_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.CHOICE, "avx51")
    with pytest.raises(UserError, match=r"unknown kernels 'avx51' in PHASEWISE_KERNELS\. Did you mean avx512"):
        native.library()
