from __future__ import annotations

from phasewise.errors import PhasewiseError, UnsupportedModel, UserError, WeightsError, near


def test_near_names_the_closest_and_all() -> None:
    assert near("lama", ["mistral", "llama"]) == "Did you mean llama? Valid: llama, mistral."
    assert near("SnapKV", ["snapkv", "h2o"]) == "Did you mean snapkv? Valid: h2o, snapkv."
    assert near("zzz", ["b", "a"]) == "Valid: a, b."
    assert near("x", []) == "No choices exist."


def test_one_root() -> None:
    for kind in (UserError, UnsupportedModel, WeightsError):
        assert issubclass(kind, PhasewiseError)
    assert not issubclass(ValueError, PhasewiseError)
