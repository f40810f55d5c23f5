"""Other methods beside drafters whose guesses begin in the middle of the model: those that they go with, and why others
are refused."""

from __future__ import annotations

import pytest

GOES_WITH = pytest.mark.parametrize("verbs", [
    {"store": "int8"}, {"store": "kivi:group=4,residual=8"}, {"evict": "snapkv:keep=0.5,window=4"},
    {"attend": "hydragen:rows=16"},
], ids=str)  # fmt: skip
REFUSED = pytest.mark.parametrize(("verbs", "why"), [
    ({"attend": "quest"}, "chooses what rows read"),
    ({"evict": "streaming"}, "ranks rows by what all layers"),
    ({"store": "zipcache"}, "ranks rows by what all layers"),
    ({"skip": "unified:speedup=2,weights=none"}, "decides which layers run"),
    ({"verify": "typical"}, "choose an exact verifier"),
], ids=str)  # fmt: skip
