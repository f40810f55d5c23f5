"""`draft.dflash`, and `draft.eagle` with P-EAGLE's heads: how much one pass guesses, and random heads. The laws of all
drafters with heads (`test_trained_drafters.py`) hold of both as well."""

from __future__ import annotations

import pytest

from phasewise.errors import UserError
from phasewise.speculation.heads.layouts import feature_heads
from tests import tiny
from tests.draft.trained import DFLASH, PEAGLE


def test_more_than_a_block_holds_is_refused() -> None:
    with pytest.raises(UserError, match=r"dflash: depth=9 .* up to 5 tokens"):
        tiny.engine(DFLASH.verbs("depth=9"))
    with pytest.raises(UserError, match=r"eagle: depth=65 .* up to 64 tokens"):
        tiny.engine(PEAGLE.verbs("depth=65"))


def test_random_heads_are_of_the_published_shape() -> None:
    made, key = feature_heads(tiny.model(), ("dflash",), "random:3")
    assert key == "dflash random:3" and made.parallel == 7 and made.config.qk_norm == "head" and made.config.layers == 2
