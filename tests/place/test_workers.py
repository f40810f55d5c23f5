"""Which placements have workers, as they say themselves, and what is said where there are none."""

from __future__ import annotations

import logging

import pytest

from phasewise import catalog
from phasewise.builder import Builder, say_nothing_travels
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.options import parse
from tests import tiny

PLACES = list(catalog.names("place"))
ALONE = [name for name in PLACES if not catalog.method("place", name).traits.launches]
WARNING = "no byte is saved on the way"


@pytest.mark.parametrize("name", PLACES)
def test_who_says_to_have_workers_hires_some(name: str) -> None:
    limits = Limits(kv_bytes=64 << 20)
    builder = Builder(tiny.model(), parse({"place": name}), limits, load=tiny.load)
    launched: list[str] = []
    launcher = builder.launcher
    builder.launcher = lambda: launched.append(name) or launcher()  # type: ignore[method-assign, func-returns-value]
    builder.build().close()
    assert bool(launched) == (name not in ALONE)


def test_a_cluster_without_workers_is_told_which_placements_have_some() -> None:
    with pytest.raises(UserError, match="needs a placement with several workers") as refused:
        tiny.engine(cluster="processes")
    said = str(refused.value)
    assert all((name in said) == (name not in ALONE) for name in PLACES), said


def told(caplog: pytest.LogCaptureFixture, **verbs: str) -> list[str]:
    caplog.clear()
    say_nothing_travels.cache_clear()
    with caplog.at_level(logging.WARNING, logger="phasewise"):
        for _ in range(3):  # said once
            tiny.engine(verbs).close()
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.parametrize("store", ["cachegen", "cachegen:level=4,chunk=16", "cachegen:level=auto"])
def test_a_store_for_the_way_is_warned_of_where_nothing_travels(caplog: pytest.LogCaptureFixture, store: str) -> None:
    pytest.importorskip("constriction")
    [said] = told(caplog, store=store)
    assert "store cachegen" in said and "--place" in said and "disaggregated" in said
    assert not told(caplog, store=store, place="disaggregated")
    assert not told(caplog, store="cachegen:level=0") and not told(caplog, store="int8") and not told(caplog)
