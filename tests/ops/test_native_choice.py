"""Which kernels are taken: the best that the processor runs, unless the environment names others."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from phasewise.errors import UserError
from phasewise.ops import native


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def runs(target: str) -> bool:
    return native.load(target) is not None


def taken() -> str | None:
    """The file of the kernels in use."""
    kernels = native.library()
    return None if kernels is None else Path(kernels._name).name


def test_the_best_that_the_processor_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.CHOICE, raising=False)
    best = next((target for target in native.TARGETS if runs(target)), None)
    name = taken()
    assert name is None if best is None else name == f"_{best}.so"


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
