"""What forms of weights cost known models: read back as it was measured, and told where a form is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phasewise.known import forms
from phasewise.known.forms import FormCost, ModelForms
from tests.cli.conftest import Cli

WORSE = FormCost(4.5, (0.03, 0.02, 0.04), (-2.0, -3.5, -0.5), ("copy", "code"))
SAME = FormCost(8.25, (0.001, -0.002, 0.004), (0.5, -1.0, 2.0), ())
FEWER = FormCost(4.25, (0.001, -0.002, 0.004), (-2.0, -3.5, -0.5), ())
TEXT = FormCost(4.25, (0.01, 0.002, 0.02), None, ())


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of costs of its own."""
    monkeypatch.setattr(forms, "FOUND", tmp_path / "forms.json")
    forms.measured.cache_clear()
    costs = {"bfloat16": SAME, "int4:group=64": WORSE, "int8": SAME}
    forms.keep("pocket", ModelForms("bfloat16", "a processor", costs))
    yield tmp_path / "forms.json"
    forms.measured.cache_clear()


def test_a_form_is_lossy_where_the_whole_interval_is_worse(found: Path) -> None:
    assert [cost.lossy for cost in (WORSE, SAME, FEWER, TEXT)] == [True, False, True, True]
    assert (
        str(SAME)
        == "no loss found: +0.0010 nats a token (-0.0020 to +0.0040), +0.5 points of right answers (-1.0 to +2.0)"
    )


def test_what_is_kept_is_read_and_other_models_stay(found: Path) -> None:
    before = forms.measured()["pocket"]
    assert before.costs == {"bfloat16": SAME, "int4:group=64": WORSE, "int8": SAME}
    forms.keep("smollm2", ModelForms("its file", "another", {"its file": SAME, "int4:group=32": TEXT}))
    forms.measured.cache_clear()
    assert forms.measured()["pocket"] == before
    assert forms.measured()["smollm2"].costs["int4:group=32"] == TEXT


def test_models_says_what_a_form_costs(found: Path, cli: Cli) -> None:
    said = cli("models", "show", "pocket", "--weights", "int4:group=64")
    assert said.code == 0 and "lossy: +0.0300 nats a token (+0.0200 to +0.0400), -2.0 points" in said.out
    assert "no loss found" in cli("models", "show", "pocket", "--dtype", "int8").out
    assert "was not measured" in cli("models", "show", "pocket", "--weights", "int4:group=32").out
    assert "lossy" not in cli("models", "show", "pocket").out
    table = cli("models", "forms", "pocket").out
    assert "beside bfloat16 (a processor)" in table and "copy, code" in table and table.count("lossy") == 1
    assert cli("models", "forms").out == table
    for name, fix in (("smollm2", "no form of smollm2 has been measured: choose pocket"), ("nosuch", "nosuch")):
        refused = cli("models", "forms", name)
        assert refused.code == 2 and fix in refused.err


def test_what_ships_was_measured() -> None:
    """Every form beside the model's own."""
    assert "pocket" in forms.measured()
    for name, each in forms.measured().items():
        own = each.costs[each.reference]
        assert own.nats == (0.0, 0.0, 0.0) and not own.lossy, name
        assert len(each.costs) > 3 and all(cost.nats[1] <= cost.nats[0] <= cost.nats[2] for cost in each.costs.values())
        assert each.costs["int8"].nats[0] < each.costs["int4:group=64"].nats[0]
