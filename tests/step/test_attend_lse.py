"""attend_lse: the native call against its plain twin, and rows that do not depend on how many come with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from phasewise.model.model import Model
from phasewise.ops import attention as ops
from phasewise.ops import native
from phasewise.step.read import Read
from phasewise.step.reads import attend_lse
from tests import tiny
from tests.asking import Asking
from tests.kv.harness import Walk

TOKENS = tiny.prompts(130)[0]


class Checked(Asking):
    """Dense attention by `attend_lse`, each time held against the plain twin; all that came out is kept."""

    def __init__(self, close: float) -> None:
        self.close, self.fit, self.out = close, 0, list[Tensor]()

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        found = attend_lse(reads)
        for read, (out, lse) in zip(reads, found):
            want, want_lse = ops.weigh(read.scores(), read.part.v, read.mask())
            torch.testing.assert_close(out, want, atol=self.close, rtol=self.close)
            torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)
            self.fit += read.few(most=read.q.shape[0]) is not None
            if read.layer == 0:
                self.out.append(out.clone())
        return [out for out, _ in found]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_it_equals_its_plain_twin(dtype: torch.dtype, close: float) -> None:
    """Prompts of more rows than `Read.few` takes by default, tokens, and a tree."""
    checked = Checked(close)
    one = Walk(Model.load(tiny.checkpoint(hidden=64), dtype=dtype), TOKENS[:100], attend=checked)
    one.plain = one.phase
    one.feed(TOKENS[:100])
    one.feed(TOKENS[100:101])
    one.try_([5, 6, 7, 8], [-1, 0, 0, 1])
    if native.library() is not None:
        assert checked.fit == 12, "four layers, three times"


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_a_rows_bits_do_not_depend_on_its_slice() -> None:
    whole, cut = Checked(2e-2), Checked(2e-2)
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    for checked, pieces in ((whole, [130]), (cut, [100, 1, 29])):
        one = Walk(model, TOKENS, attend=checked)
        one.plain, at = one.phase, 0
        for size in pieces:
            one.feed(TOKENS[at : at + size])
            at += size
    assert torch.equal(torch.cat(whole.out), torch.cat(cut.out))
