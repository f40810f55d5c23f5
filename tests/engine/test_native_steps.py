"""Which path methods take, as docs/methods.md says: whole native steps, halves of layers, or the open path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.bench.drive import Bench
from phasewise.engine.limits import Limits
from phasewise.methods.evict._running import Running
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.options import DEFAULTS
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, Dist, Sample
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import Traits
from tests import tiny
from tests.laws import settings as laws
from tests.watched import passes

VERBS = ("schedule", "attend", "evict", "store", "skip")
SELDOM = ("infllm", "loopserve")  # asked for prompts, or where a choice is due


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
@pytest.mark.parametrize(("verb", "name"), [(v, n) for v, n in laws.discovered() if v in VERBS])
def test_who_looks_halves_the_step_and_no_one_else(verb: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one prompt in bfloat16: which steps are whole native calls, which are halves, and which are open."""
    made = passes(monkeypatch)
    options = laws.options(verb, name, {"rows_per_group": 8} if name == "layered" else None)
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    engine: Any = tiny.engine(options, of=model, prefix_cache=False)
    tiny.run(engine, tiny.prompts(40), tiny.greedy(12))
    steps, whole = engine.counters.forwards, sum(each.whole for each in made)
    method, phase = catalog.method(verb, name), engine.parts.phases[-1]
    traits = method().traits
    acts = set(traits.phases)
    looks = (verb == "evict" and name != DEFAULTS[verb] and not hasattr(phase.evict, "window")) or name == "power"
    if hasattr(engine.parts.store.format, "cuts"):  # blocks are opened
        looked = verb == "evict" or "evict" in traits.fills  # at the prompt: its step is halved
        assert len(made) == 1 and whole == (not looked)  # the prompt alone is native
    elif phase.skip is not None and type(phase.skip).walk_of is Skip.walk_of and phase.skip.walk is None:
        # which rows run a layer is decided on the way
        assert len(made) == whole == (1 if acts == {"decode"} else 0)  # the prompt's
    else:
        assert len(made) == steps, "a step took the open path"
        if name in SELDOM:
            assert steps / 3 < whole < steps
        elif not looks:
            assert whole == steps
        elif acts == {"decode"} or name == "rlkv":  # which looks at rows behind the prompt alone
            assert whole < steps / 2  # prompts only
        elif acts == {"prefill"} or name in ("h2o", "tova", "keyformer", "power"):  # these only look at prompts
            assert whole == steps - 1  # all but the prompt's
        else:
            assert whole == 0


NEW = 30


class Follows(Method, Sample):
    """A `sample` that writes a given text, and keeps the logits."""

    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    traits: ClassVar[Traits] = Traits("sample")

    def __init__(self, text: Sequence[int], then: Callable[[], None] | None = None) -> None:
        self.text, self.seen, self.then = text, list[Tensor](), then

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        self.seen.append(logits.float().clone())
        if self.then is not None:  # after every forward
            self.then()
        return Dist([self.text[context.position] for context in contexts], logits.shape[-1])


def written(
    model: Model, verbs: dict[str, str | None], text: Sequence[int], then: Callable[[], None] | None = None
) -> tuple[Tensor, int]:
    """Logits of NEW tokens of a text after a prompt of 100, and the bytes of KV that were read."""
    follows = Follows(text, then)
    engine = Bench(model).engine({"schedule": "prefill_first"} | verbs, Limits(prefix_cache=False), sample=follows)
    tiny.run(engine, [list(text[:100])], tiny.greedy(NEW))
    return torch.cat(follows.seen), engine.counters.kv_bytes_read


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
@pytest.mark.parametrize(
    ("store", "spread"), [("int8", ""), ("slab", "layers=pyramid,heads=ada"), ("int8", "heads=ada")]
)
def test_rows_with_gaps_are_read_as_the_open_path_reads_them(
    store: str, spread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an eviction, slots are no positions, and layers and heads hold other rows, or other numbers of them. The
    prompt takes the open path, so that no rounding decides which rows stay."""
    model, text = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(160)[0]
    stack, made, method = model.stack, passes(monkeypatch), f"snapkv:keep=8,window=4,{spread}".rstrip(",")

    def logits(natively: bool, evict: str) -> tuple[Tensor, int]:
        model.stack = None
        then = (lambda: setattr(model, "stack", stack)) if natively else None
        return written(model, {"evict": evict, "store": store}, text, then)

    (whole, read), (opened, same), (dense, all_of_it) = (
        logits(natively, evict) for natively, evict in ((True, method), (False, method), (True, "none"))
    )
    assert len(made) == 2 * (NEW - 1) and all(each.whole for each in made), "a token took the open path"
    assert read == same < all_of_it / 2
    assert (whole - opened).abs().mean() < 0.05 * (whole - dense).abs().mean(), "more than bfloat16's rounding"


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
@pytest.mark.parametrize(("spread", "asked"), [("layers=pyramid", False), ("heads=ada", False), ("heads=ada", True)])
def test_who_looks_at_heads_of_unequal_length_halves_the_step(
    spread: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where all that is wanted is what the row attends to, which kernels find on their way. Nothing more is
    given up after the prompt, so that no rounding decides which rows stay."""
    if asked:
        monkeypatch.setattr(Running, "weigh", lambda self, span: None)
    model, text = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(160)[0]
    stack, made, method = model.stack, passes(monkeypatch), f"h2o:heavy=20.0,recent=20.0,lot=4096,{spread}"

    def logits(natively: bool, evict: str) -> tuple[Tensor, int]:
        model.stack = None
        then = (lambda: setattr(model, "stack", stack)) if natively else None
        return written(model, {"evict": evict}, text, then)

    (native_step, read), (opened, same), (dense, _) = (
        logits(*each) for each in ((True, method), (False, method), (True, "none"))
    )
    end = 2 * model.config.layers
    assert [each.stops for each in made[: NEW - 1]] == [[*(range(1, end, 2) if asked else ()), end]] * (NEW - 1)
    assert read == same if asked else read < 0.7 * same, "keys are read once, not twice"
    assert (native_step - opened).abs().mean() < 0.2 * (native_step - dense).abs().mean(), "more than rounding"


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
@pytest.mark.parametrize(("speedup", "weights"), [(1.5, "none"), (2.0, "random:3")])
def test_a_walk_known_beforehand_is_walked_as_the_open_path_does(speedup: float, weights: str) -> None:
    """With low-rank weights beside the model's own, too."""
    model, text = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(160)[0]
    stack, skip = model.stack, f"unified:speedup={speedup},weights={weights}"
    whole, read = written(model, {"skip": skip}, text)
    assert model._walks, "it was no native step"
    dense, all_of_it = written(model, {}, text)
    model.stack = None
    opened, same = written(model, {"skip": skip}, text)
    assert stack is not None and read == same < all_of_it
    assert (whole - opened).abs().mean() < 0.05 * (whole - dense).abs().mean(), "more than bfloat16's rounding"


@pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
def test_a_prompt_that_crosses_in_groups_of_layers_has_the_bits_of_one_that_crosses_at_once() -> None:
    model, text = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16), tiny.prompts(160)[0]
    grouped, read = written(model, {"schedule": "layered:rows_per_group=30"}, text)
    at_once, same = written(model, {}, text)
    assert model._walks, "it was no native step"
    assert torch.equal(grouped, at_once) and read == same
