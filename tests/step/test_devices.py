"""A forward on another device than the CPU: on `meta`, tensors of two devices do not mix, and no number can be read."""

from __future__ import annotations

import pytest

from phasewise.model.model import Model
from tests import tiny
from tests.kv.harness import Walk, sliding

TREE, PARENTS = [5, 6, 7, 8], [-1, 0, 0, 1]


@pytest.mark.parametrize("window", [None, 24], ids=["full", "sliding"])
def test_prompts_tokens_and_trees_stay_on_their_device(window: int | None) -> None:
    """What asks the device for a number waits for all its work; masks made on the host would have to be sent there."""
    path = tiny.checkpoint() if window is None else sliding(window, 4).files.path
    model, prompt = Model.load(path, device="meta"), tiny.prompts(60)[0]
    one = Walk(model, prompt)
    assert one.feed(prompt[:33]).device.type == "meta"
    assert one.feed(prompt[33:]).device.type == "meta"
    assert one.feed([5]).device.type == "meta"
    logits = one.try_(TREE, PARENTS)
    assert logits.device.type == "meta" and logits.shape == (4, tiny.VOCAB)
    one.commit(TREE, [0, 2])
    assert one.request.computed == 63
    assert one.feed([9, 10, 11]).shape == (3, tiny.VOCAB)
