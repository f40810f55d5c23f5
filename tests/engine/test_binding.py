"""Binding: one runtime in several slots, decode methods that bring their own, and equal methods bound once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.binding import Bindings, settle
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.attend.quest import Quest
from phasewise.methods.decode.autoregressive import Autoregressive
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.skip.unified import Unified
from phasewise.options import defaults, parse, spell
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.step.phase import Hidden, Phase
from phasewise.step.plan import AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.decode import Decode, Outcome
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import Traits
from tests import oracle, tiny
from tests.engine.dummies import installed

LENGTHS, N = (41, 7, 66), 16
seen: list[Any] = []  # every method of this page that was bound, in order


@dataclass(frozen=True)
class Window(Method):
    """An attend method that evicts too: a window with sinks, read and given up by one runtime."""

    window: int = 10
    traits: ClassVar[Traits] = Traits("attend", fills=("evict",), frees_rows=True)

    def bind(self, host: Host) -> _Window:
        seen.append(self)
        return _Window(host.bind(Streaming(2, self.window, "text")))


class _Window(Attend, Evict):
    observes = 0

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def plan(self, span: Span) -> AttentionPlan:
        """Of both slots, so it is asked once."""
        return replace(self.inner.plan(span), keys=Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor]:
        return [read.attend() for read in reads]

    def due(self, request: Request) -> bool:
        return bool(self.inner.due(request))

    def keep(self, request: Request, layer: int) -> Any:
        return self.inner.keep(request, layer)


@dataclass(frozen=True)
class Half(Unified):
    """A skip method that also fills evict."""

    traits: ClassVar[Traits] = Traits("skip", fills=("evict",))


@dataclass(frozen=True)
class Stored(Quest):
    """An attend method that wants a slot which cannot be shared."""

    traits: ClassVar[Traits] = Traits("attend", fills=("store",))


@dataclass(frozen=True)
class Owner(Method):
    """A decode method with attend and skip of its own, while `own` is on."""

    own: bool = True
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    composes: ClassVar[tuple[str, ...]] = ()

    @property
    def traits(self) -> Traits:
        return Traits(
            "decode", phases=self.phases, brings=("attend", "skip") if self.own else (), composes=self.composes
        )

    def bind(self, host: Host) -> _Owner:
        seen.append(self)
        return _Owner(
            host.bind(Autoregressive()), {"attend": Quest(4, 12, 0), "skip": host.bind(Unified(weights="none"))}
        )


@dataclass(frozen=True)
class Composer(Owner):
    """The same, but on top of the skip method that the user chose."""

    composes: ClassVar[tuple[str, ...]] = ("skip",)


class _Owner(Decode):
    def __init__(self, inner: Any, own: dict[str, Any]) -> None:
        self.inner, self.own = inner, own
        self.chosen: list[tuple[str, Any]] = []

    def rows(self, request: Request) -> int:
        return int(self.inner.rows(request))

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans: list[Span] = self.inner.propose(requests, budgets, phase)
        return spans

    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        outcomes: list[Outcome] = self.inner.accept(spans, hidden)
        return outcomes

    def bring(self, verb: str, chosen: Any) -> Any:
        self.chosen.append((verb, chosen))
        return self.own[verb] if chosen is None else Either(self.own[verb], chosen)


class Either(Skip):
    """Rows skip a layer where one of two skip methods says so for all of them."""

    def __init__(self, *both: Any) -> None:
        self.both = both

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        found = [index for skip in self.both if (index := skip.rows(layer, span, x)) is not None]
        assert all(not len(index) for index in found)
        return found[0] if found else None

    def unused(self, layers: int) -> Sequence[int]:
        return sorted(set(self.both[0].unused(layers)) | set(self.both[1].unused(layers)))


@pytest.fixture(autouse=True)
def dummies() -> Iterator[None]:
    seen.clear()
    classes = {
        "attend.window": Window, "attend.stored": Stored, "skip.half": Half, "evict.misfiled": Window,
        "decode.owner": Owner, "decode.composer": Composer,
    }  # fmt: skip
    with installed(classes):
        yield


def tokens(options: dict[str, str]) -> list[list[int]]:
    return tiny.outs(tiny.run(tiny.engine(options), tiny.prompts(*LENGTHS), tiny.greedy(N)))


# ---- one runtime in several slots
def test_one_object_fills_both_slots_of_all_phases() -> None:
    placed: Any = tiny.engine({"attend": "window"})
    runtimes = {id(slot) for phase in placed.parts.recipes[""].phases for slot in (phase.attend, phase.evict)}
    assert len(runtimes) == 1 and seen == [Window()]
    assert isinstance(placed.parts.recipes[""].phases[0].attend, _Window)


def test_it_does_the_work_of_both() -> None:
    want = tokens({"evict": "streaming:sinks=2,window=10,positions=text"})
    assert tokens({"attend": "window"}) == want != tokens({})
    assert tokens({"attend": "window:window=1000"}) == tokens({})
    assert tokens({"attend": "window", "place": "disaggregated"}) == want


def test_in_a_phase_it_leaves_alone_it_only_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "traits", replace(Window.traits, phases=("decode",)))
    placed: Any = tiny.engine({"attend": "window"})
    first, last = placed.parts.recipes[""].phases
    assert last.attend is last.evict is first.evict and first.attend == catalog.build("attend", "dense")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attend": "window", "evict": "snapkv"}, "attend window also fills evict: leave out --evict snapkv"),
        ({"attend": "window", "skip": "half"}, "attend window and skip half both fill evict"),
        ({"attend": "stored"}, "attend stored cannot fill store: only attend, evict, skip can be shared"),
        ({"evict": "misfiled"}, "evict misfiled says it is a method of attend"),
    ],
)
def test_a_slot_claimed_twice_is_refused_by_name(options: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse(options)


def test_the_default_may_be_named_and_settling_twice_is_settling_once() -> None:
    methods = parse({"attend": "window", "evict": "none"})
    assert methods["evict"] is methods["attend"] and methods == parse({"attend": "window"})
    assert settle(methods, defaults()) == methods


def test_phases_settle_methods_that_no_text_named() -> None:
    plain = {"decode": Autoregressive(), **defaults()}
    for phase in bindings().phases({**plain, "attend": Window()}, ("prefill", "decode")):
        assert phase.attend is phase.evict
    with pytest.raises(UserError, match="attend window also fills evict: leave out --evict streaming"):
        bindings().phases({**plain, "attend": Window(), "evict": Streaming()}, ("decode",))


# ---- a decode method that brings its own
def test_what_it_brings_is_used_in_its_phases() -> None:
    placed: Any = tiny.engine({"decode": "owner"})
    first, last = placed.parts.recipes[""].phases
    assert last.decode is first.decode and seen == [Owner()]
    assert last.attend is last.decode.own["attend"] and last.skip is last.decode.own["skip"]
    assert first.attend == catalog.build("attend", "dense") and first.skip is None
    assert last.decode.chosen == [("attend", None), ("skip", None)]
    want = tokens({"attend": "quest:page=4,budget=12,dense_layers=0", "skip": "unified:weights=none"})
    assert tokens({"decode": "owner"}) == want != tokens({})


def test_without_phases_it_is_used_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owner, "phases", ("prefill", "decode"))
    placed: Any = tiny.engine({"decode": "owner"})
    first, last = placed.parts.recipes[""].phases
    assert first.attend is last.attend is last.decode.own["attend"] and first.skip is last.skip is not None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"decode": "owner", "skip": "unified:weights=none"},
            "decode owner brings its own skip: leave out --skip unified",
        ),
        ({"decode": "owner", "attend": "quest"}, "decode owner brings its own attend: leave out --attend quest"),
        ({"decode": "owner", "attend": "window"}, "decode owner brings its own attend: leave out --attend window"),
        ({"decode": "composer", "attend": "quest"}, "decode composer brings its own attend: leave out --attend quest"),
    ],
)
def test_what_the_user_chose_beside_it_is_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse(options)


def test_knobs_may_decide_whether_it_brings_anything() -> None:
    assert tokens({"decode": "owner:own=no", "skip": "unified:weights=none"}) == tokens(
        {"skip": "unified:weights=none"}
    )
    assert tokens({"decode": "owner", "skip": "all", "attend": "dense"}) == tokens({"decode": "owner"})


def test_it_composes_what_it_says_it_composes() -> None:
    placed: Any = tiny.engine({"decode": "composer", "skip": "unified:speedup=4,weights=none"})
    last = placed.parts.recipes[""].phases[-1]
    assert isinstance(last.skip, Either) and last.skip.both[0] is last.decode.own["skip"]
    assert last.skip.both[1].skipped == frozenset({1, 2}) and last.decode.chosen[0] == ("attend", None)
    assert tokens({"decode": "composer"}) == tokens({"decode": "owner"})


# ---- equal methods are bound once
@dataclass(frozen=True)
class Counted(Method):
    """A method whose runtime is a new object at every binding."""

    k: int = 1

    def bind(self, host: Host) -> object:
        seen.append(self)
        return object()


@dataclass
class Loose(Method):
    """A method that cannot be hashed."""

    note: list[int] = field(default_factory=list)

    def bind(self, host: Host) -> object:
        return object()


def bindings() -> Bindings:
    sample = catalog.build("sample", "standard")
    host = Host(tiny.model(), sample, Counters(), tiny.load, lambda name, model: None)  # type: ignore[arg-type, return-value]
    return Bindings(replace(host, sample=host.bind(sample)), defaults())


def test_equal_methods_share_a_runtime() -> None:
    bound = bindings()
    assert bound.bind(Counted(1)) is bound.bind(Counted(1)) is not bound.bind(Counted(2))
    assert seen == [Counted(1), Counted(2)]
    assert bindings().bind(Counted(1)) is not bound.bind(Counted(1))  # every engine has its own


def test_equality_asks_for_the_class_too() -> None:
    bound = bindings()
    a, b = bound.bind(Unified(4.0, "none")), bound.bind(Half(4.0, "none"))
    assert a is not b and a is bound.bind(Unified(4, "none"))


def test_what_cannot_be_hashed_is_told_apart_by_identity() -> None:
    bound, one, other = bindings(), Loose(), Loose()
    assert one == other
    assert bound.bind(one) is bound.bind(one) is not bound.bind(other)


def test_recipes_share_what_they_have_in_common() -> None:
    bound, names = bindings(), ("prefill", "decode")
    plain, again, other = (
        bound.phases(parse(options), names)
        for options in (
            {"decode": "block_diffusion:selector=static", "evict": "streaming"},
            {"decode": "block_diffusion:selector=(static)", "evict": "streaming", "skip": "all"},
            {
                "decode": "block_diffusion:selector.threshold=0.5",
                "evict": "streaming:window=9",
                "skip": "unified:weights=none",
            },
        )
    )
    for a, b, c in zip(plain, again, other):
        assert a.decode is b.decode and a.evict is b.evict and a.attend is b.attend
        assert c.decode is not a.decode and c.evict is not a.evict and c.attend is a.attend
    assert plain[0].decode is plain[1].decode and plain[0].skip is plain[1].skip is None
    assert other[0].skip is None and other[1].skip is not None


# ---- what text says reaches the engine
def test_nested_methods_work_in_every_placement() -> None:
    given = {"decode": "speculative:draft=(prompt_lookup:k=6,min_match=1),verify=match"}
    prompts = [*tiny.prompts(40, 9), [5, 6, 7, 8] * 12]
    for place in ("colocated", "disaggregated"):
        placed = tiny.engine({**given, "place": place})
        got = tiny.outs(tiny.run(placed, prompts, tiny.greedy(N)))
        assert got == [oracle.greedy(tiny.checkpoint(), prompt, N)[0] for prompt in prompts]
        assert placed.counters.drafted > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": "draft_model:k=3,drawn=iid", "verify": "match", "store": "int8", "schedule": "sarathi:budget=7"},
        {"attend": "window:window=9", "place": "disaggregated:share=0.25"},
        {"decode": "block_diffusion:selector=local_leap,selector.radius=2,steps=none", "evict": "streaming"},
        {"decode": "composer:own=no", "skip": "half:speedup=4,weights=none"},
    ],
    ids=str,
)
def test_a_recipe_can_be_sent_as_text(options: dict[str, str]) -> None:
    methods = parse(options)
    texts = spell(methods)
    assert parse(texts) == methods and spell(parse(texts)) == texts
    assert not {"draft", "verify"} & texts.keys()


def test_prefixes_are_known_by_the_parts_that_shaped_them() -> None:
    def key(decode: str) -> str:
        placed: Any = Builder(tiny.model(), parse({"decode": decode}), Limits(), load=tiny.load).build()
        return str(placed.store.sharing.prefix_key)

    assert key("block_diffusion") == key("block_diffusion:selector=dynamic,selector.threshold=0.9")
    different = ["", ":selector=static", ":selector=sequential", ":selector.threshold=0.5", ":selector=local_leap"]
    assert len({key(f"block_diffusion{knobs}") for knobs in different}) == len(different)
    assert " at 0x" not in key("block_diffusion")


def test_recipes_whose_stores_differ_share_no_rows_and_no_format() -> None:
    """Neither where they are of two kinds, nor where they differ in a knob alone."""
    stores = {"": "slab", "eight": "int8:bits=8", "sixteen": "int8:bits=16"}
    recipes = {name: parse({"store": store}) for name, store in stores.items() if name}
    placed: Any = Builder(tiny.model(), parse({}), Limits(kv_bytes=64 << 20), recipes=recipes, load=tiny.load).build()
    (prompt,) = tiny.prompts(70)
    for name, store in stores.items():
        together, alone = Request(prompt, tiny.greedy(N), recipe=name), Request(prompt, tiny.greedy(N))
        own = tiny.engine({"store": store})
        for engine, request in ((placed, together), (own, alone)):
            engine.add(request)
            while request.left is None:  # and its prompt's rows stay for others
                engine.step()
        assert together.out == alone.out
        assert placed.counters.prefix_hits == 0
        assert placed.parts.recipes[name].store.row_bytes == own.store.row_bytes
