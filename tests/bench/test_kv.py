"""KV methods over their bytes: who takes part, bytes in closed form, fronts by brute force, and lines that go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise import catalog
from phasewise.bench import kv
from phasewise.bench.front import HEADER, INTRO, cells, front, notes, points, section
from phasewise.bench.kv import DENSE, KEEPING, LOOKS, KVBench, chosen, count, every, ladder, looks
from phasewise.bench.settings import BenchSetting
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.methods.evict.streaming import EVERY
from phasewise.ops.native.spans import BLOCK
from phasewise.options import DEFAULTS, parse
from tests import tiny
from tests.serve.tiny_chat import chat_checkpoint

N, NEW = 100, 8
HEADS, DIM, LAYERS = 2, 12, 4
ROW = LAYERS * HEADS * 2 * DIM * 4


# ---- who takes part
CHANGERS = {("decode", "kv_prediction"), ("decode", "c2c"), ("decode", "augment")}  # make a prompt's KV otherwise


def test_every_lossy_method_is_there_at_each_step_of_its_ladder() -> None:
    found = {(verb, text.partition(":")[0]) for one in every() for verb, text in one.verbs.items() if verb != "place"}
    wanted = CHANGERS | {(verb, name) for verb, name, method in catalog.every()
                         if verb in KEEPING and name != DEFAULTS[verb] and method.guarantee == "lossy"}  # fmt: skip
    assert found == wanted
    assert {("evict", "snapkv"), ("attend", "quest"), ("store", "int8"), ("skip", "lazyllm")} <= wanted
    assert len({one.name for one in every()}) == len(every())
    for setting in every():
        parse(setting.verbs)  # every step can be built


@pytest.mark.parametrize(("verb", "name", "method"), [one for one in catalog.every() if one[2].budgets])
def test_ladders_are_settings_and_no_step_comes_twice(verb: str, name: str, method: Any) -> None:
    steps = [method(**knobs) for knobs in method.budgets]
    assert steps and len({repr(step) for step in steps}) == len(steps)
    assert [catalog.build(verb, one.verbs[verb]) for one in ladder(verb, name)] == steps


ONE_FORM = {("store", "int8"), *CHANGERS}  # there is one way to have them


def test_every_method_has_a_ladder_of_budgets() -> None:
    for verb, name in {(verb, text.partition(":")[0]) for one in every() for verb, text in one.verbs.items()}:
        if verb != "place":
            assert len(catalog.method(verb, name).budgets) >= 2 or (verb, name) in ONE_FORM, name


def test_what_is_trained_comes_before_its_control() -> None:
    for verb, name, method in catalog.every():
        none = getattr(method, "untrained", {})
        if none.get("weights") == "none":
            assert method.budgets == ({}, none) and verb in KEEPING, name
    assert [one.name for one in ladder("evict", "longgen")] == ["evict=longgen", "evict=longgen:weights=none"]


def test_pyramids_and_heads_that_compete_are_there_at_two_budgets_each() -> None:
    names = [one.name.removeprefix("evict=snapkv:") for one in ladder("evict", "snapkv")]
    for kind in ("layers=pyramid", "heads=ada"):
        assert [name for name in names if kind in name] == [f"keep=0.25,{kind}", f"keep=0.125,{kind}"]


def test_a_ladder_may_be_cut_short_and_keeps_what_saves_most() -> None:
    names = [one.name for one in ladder("attend", "quest")]
    assert names == ["attend=quest", *(f"attend=quest:budget={n}" for n in (512, 256, 128))]
    assert [one.name for one in ladder("attend", "quest", 1)] == names[3:]
    assert [one.name for one in ladder("attend", "quest", 2)] == names[1::2]
    assert [one.name for one in ladder("attend", "quest", 9)] == names


def test_kinds_of_a_method_are_cut_each_for_itself() -> None:
    plain, kinds = ["keep=0.5", "keep=0.25", "keep=0.125"], ("layers=pyramid", "heads=ada")
    for most in (1, 2, 3):
        names = [one.name.removeprefix("evict=snapkv:") for one in ladder("evict", "snapkv", most)]
        others = [f"{keep},{kind}" for kind in kinds for keep in plain[-min(most, 2) :]]
        assert names == [*plain[-most:], *others]
    assert len(ladder("attend", "power", 1)) == 2  # trained, and its control


def test_knobs_and_pairs_are_taken_as_they_are_and_each_once() -> None:
    found = chosen(["evict=snapkv", "evict=snapkv:keep=0.25", "store=int8 evict=snapkv", "skip=unified"])
    assert [one.name for one in found] == [
        *(one.name for one in ladder("evict", "snapkv")), "store=int8 evict=snapkv", "skip=unified",
        "skip=unified:weights=none",
    ]  # fmt: skip
    assert [one.name for one in chosen(["decode=c2c", "decode=block_diffusion", "attend=hydragen"])] == [
        "decode=c2c", "decode=block_diffusion", "attend=hydragen",
    ]  # fmt: skip
    with pytest.raises(UserError, match="snapkv"):
        chosen(["evict=snapkw"])


def test_what_acts_on_the_way_between_engines_has_two() -> None:
    assert all(one.verbs["place"] == "disaggregated" for one in ladder("store", "cachegen"))
    assert "place" not in ladder("store", "int8")[0].verbs


# ---- bytes
def counted(verbs: dict[str, str], n: int = N, new: int = NEW, **limits: Any) -> kv.Bytes:
    engine = tiny.engine(verbs, **limits)
    found = count(engine, [(prompt, new) for prompt in tiny.prompts(n, n)])
    engine.forget_prefixes()
    assert engine.idle and engine.kv_bytes == 0
    return found


def steps(start: int) -> float:
    """Rows that the steps after the first token read, on average, their own included, from `start` after the prompt."""
    return sum(start + i for i in range(1, NEW)) / (NEW - 1)


@pytest.mark.parametrize(
    ("verbs", "row", "kept"),
    [
        ({}, ROW, N),
        ({"evict": "snapkv:keep=20,window=4"}, ROW, 20),
        ({"store": "int8"}, LAYERS * HEADS * 2 * (DIM + 2), N),
        ({"store": "int8", "evict": "snapkv:keep=0.5"}, LAYERS * HEADS * 2 * (DIM + 2), 50),
        ({"attend": "hydragen"}, ROW, N),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_rows(verbs: dict[str, str], row: int, kept: int) -> None:
    found = counted(verbs)
    referred = (
        BLOCK if verbs.get("attend") == "hydragen" else 0
    )  # of the prefix cache, which has whole blocks of a prompt
    assert found.live == row * (kept + NEW - 1 - referred)  # the last token has no row yet
    assert found.read == pytest.approx(row * steps(kept))
    assert found.layers == found.prompt_layers == LAYERS and found.sent == 0


def test_neutral_knobs_cost_nothing() -> None:
    assert counted({"evict": "snapkv:keep=1.0"}) == counted({})


def test_a_window_holds_and_reads_itself() -> None:
    found = counted({"evict": "streaming:sinks=2,window=30"})
    assert ROW * 32 <= found.read < ROW * (32 + EVERY)  # rows lie idle until many are dropped at once
    assert found.live is not None and ROW * 31 <= found.live < ROW * (32 + EVERY)
    later = counted({"evict": "streaming:sinks=2,window=30"}, n=3 * N)
    assert later.live is not None and later.live < ROW * (32 + EVERY)


def test_pages_are_read_and_what_is_kept_beside_rows_counts() -> None:
    found, dense = counted({"attend": "quest:page=4,budget=12,dense_layers=0"}), counted({})
    assert dense.live is not None and found.live is not None and found.live > dense.live
    assert found.read < dense.read / 2


def test_half_the_layers_read_half() -> None:
    found, dense = counted({"skip": "unified:weights=none"}), counted({})
    assert found.read == dense.read / 2 and found.layers == LAYERS / 2 and found.prompt_layers == LAYERS


def test_what_is_sent_is_seen_and_what_lies_elsewhere_is_not() -> None:
    verbs = {"place": "disaggregated", "store": "cachegen"}
    coarse, fine = (counted({**verbs, "store": f"cachegen:level={n}"}, cluster="inline") for n in (4, 0))
    assert 0 < coarse.sent < fine.sent
    assert fine.sent == pytest.approx(ROW, rel=0.2)
    assert coarse.read == fine.read


def test_several_prompts_are_means() -> None:
    short, long = tiny.prompts(40, 80)
    engine = tiny.engine({})
    both = count(engine, [(short, NEW), (long, NEW)])
    alone = [count(tiny.engine({}), [(prompt, NEW)]) for prompt in (short, long)]
    assert both.read == pytest.approx(sum(one.read for one in alone) / 2)
    assert both.live == ROW * (60 + NEW - 1)


def test_an_answer_of_one_token_still_reads() -> None:
    assert counted({}, new=1).read == ROW * (N + 1)


def test_who_fails_says_so() -> None:
    with pytest.raises(UserError, match="--kv-bytes"):
        counted({}, kv_bytes=ROW * N // 2)


def test_all_look_at_the_same_prompts() -> None:
    asked = [([i], 1) for i in range(30)]
    assert looks(asked, 0) == looks(list(asked), 0) and len(looks(asked, 0)) == LOOKS
    assert looks(asked, 0) != looks(asked, 1) and looks(asked[:3], 0) == asked[:3]


# ---- fronts
@given(st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 6)), st.integers(0, 6)), max_size=9))
def test_nobody_on_the_front_is_beaten_and_all_others_are(some: list[tuple[float | None, float]]) -> None:
    on = front(some)
    best = [one for one, its in zip(some, on, strict=True) if its]
    assert all(cost is not None for cost, _ in best)
    for (cost, better), its in zip(some, on, strict=True):
        if cost is None:
            continue
        beats = [o for o in some if o[0] is not None and o[0] <= cost and o[1] >= better and o != (cost, better)]
        assert its == (not beats)


def line(setting: str, values: list[float], live: float | None, read: float, **more: Any) -> dict[str, Any]:
    value = sum(values) / len(values)
    row = {"name": "t", "unit": "exact", "n": len(values), "value": value, "low": value - 0.1, "high": value + 0.1}
    cost = {"live": live, "read": read, "layers": 4.0, "sent": 0.0, "prompt_read": 64.0, "prompt_layers": 4.0}
    return {"setting": setting, "task": "t", **row, "values": values, **cost, **more}


LINES = [
    line(DENSE, [1.0] * 10, 2048, 1024),
    line("evict=snapkv:keep=0.5", [1.0] * 8 + [0.0] * 2, 1024, 512),
    line("evict=snapkv:keep=0.25", [1.0] * 5 + [0.0] * 5, 1024, 256, prompt_layers=2.0),
    line("attend=quest", [1.0] * 9 + [0.0], 4096, 256),
    line("store=cachegen", [1.0] * 9 + [0.0], None, 1024, sent=128.0),
    {"setting": "skip=unified", "task": "t", "refused": "lies in /home/me"},
]


def test_settings_stand_beside_dense() -> None:
    (some,) = points(LINES).values()
    assert [point.fronts for point in some] == [("live", "read"), ("live",), (), ("read",), ()]
    assert [point.family for point in some][1:4] == ["evict=snapkv", "evict=snapkv", "attend=quest"]
    half = some[1]
    assert half.less is not None and half.less.mean == pytest.approx(-0.2) and half.less.low < -0.2 < half.less.high
    assert half.share("live") == half.share("read") == 0.5 and some[4].share("live") is None
    shown = cells(half)
    assert len(shown) == len(HEADER) and shown[0] == "`evict=snapkv:keep=0.5`" and shown[3:] == [
        "1 KiB", "50%", "512 B", "50%", "live",
    ]  # fmt: skip
    assert "-20.0 points" in shown[2] and shown[1].startswith("80.0%")


def test_ways_to_share_rows_out_are_systems_of_their_own_and_numbers_are_not() -> None:
    of = {"evict=snapkv:keep=0.25,layers=pyramid": "evict=snapkv:layers=pyramid", "attend=quest": "attend=quest",
          "attend=zero_tuning:gamma=2.0,weights=none": "attend=zero_tuning:weights=none",
          "store=int8 evict=snapkv:keep=0.5": "store=int8 evict=snapkv"}  # fmt: skip
    some = points([line(DENSE, [1.0], 1, 1), *(line(setting, [1.0], 1, 1) for setting in of)])["t"]
    assert [point.family for point in some[1:]] == list(of.values())


def test_of_nats_less_is_better() -> None:
    lines = [line(DENSE, [2.0, 2.5], 10, 10, unit="nats/token"), line("a=b", [1.5, 2.0], 5, 20, unit="nats/token")]
    dense, other = points(lines)["t"]
    assert dense.fronts == ("read",) and other.fronts == ("live", "read")
    assert other.less is not None and other.less.mean == pytest.approx(-0.5) and "nats" in cells(other)[2]


def test_without_dense_there_is_nothing_to_say() -> None:
    assert points(LINES[1:]) == {}


def test_a_page_names_what_was_refused_and_no_place() -> None:
    text = section(LINES, "### M")
    assert text.startswith("### M") and text.count("| `evict=snapkv:keep=0.5` |") == 1
    assert "Not run: `skip=unified`, t." in text and "/home/me" not in text
    assert any("/home/me" in note for note in notes(LINES))
    assert "`store=cachegen` 128 B" in text and "of dense's: `evict=snapkv:keep=0.25` 50%." in text
    assert INTRO.startswith("# ")


# ---- everything
NEEDING = ("trained", "calibration")
GHOST = "draft=draft_model:model=nowhere"


@cache
def llm() -> LLM:
    return LLM(str(chat_checkpoint()), dtype="float32", limits=Limits(kv_bytes=64 << 20, cluster="inline"))


class Bar:
    titles: ClassVar[list[str]] = []

    @staticmethod
    @contextmanager
    def of(title: str, total: int) -> Iterator[Any]:
        Bar.titles.append(title)
        yield lambda done: None


def measuring(*settings: str, tasks: tuple[str, ...] = ("copy", "code"), **more: Any) -> KVBench:
    return KVBench(llm(), "M", [BenchSetting.parse(text) for text in settings], tasks, 2, **more)


@pytest.mark.thorough
def test_all_are_measured_on_the_same_examples_and_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    run = measuring("evict=snapkv:keep=0.25,window=4", GHOST)
    lines = list(run.run([], Bar.of))
    assert [(one["setting"], one["task"]) for one in lines] == [
        (setting, task) for setting in (DENSE, "evict=snapkv:keep=0.25,window=4", GHOST)
        for task in ("copy", "code")
    ]  # fmt: skip
    assert all("nowhere" in one["refused"] for one in lines[4:])
    assert all(len(one["values"]) == one["n"] == 2 for one in lines[:4])
    by = points(lines)
    assert by["code"][1].share("live") < 0.6 and by["code"][0].line["unit"] == "nats/token"  # type: ignore[operator]
    assert by["code"][1].less is not None and by["code"][1].less.mean != 0

    Bar.titles.clear()
    again = list(run.run(lines[:3], Bar.of))
    assert again == lines[3:] and Bar.titles[0] == "evict=snapkv:keep=0.25,window=4: code (4 of 6)"
    assert run.known([*lines, *lines]) == lines
    assert measuring("store=int8").known(lines) == lines[:2]
    assert measuring(seed=1).known(lines) == [] == measuring(base={"store": "int8"}).known(lines)

    # of another text, as the source of another Python's library is, examples are others whatever their seed
    assert [line["text"] is None for line in lines[:4]] == [True, False] * 2  # copies are made here, code is not
    assert run.known([{key: value for key, value in line.items() if key != "text"} for line in lines[:4]]) == []
    monkeypatch.setattr(kv.index, "text", lambda task, prompts: None if task == "copy" else "another")
    assert run.known(lines[:4]) == lines[:4:2]


@pytest.mark.thorough
def test_who_lacks_what_was_trained_is_refused_and_the_others_go_on() -> None:
    """The tiny model has no artefacts: every contender that needs some says which command trains them."""
    settings = [one for one in every() if any(catalog.method(verb, text.partition(":")[0]).needs in NEEDING
                                              for verb, text in one.verbs.items())]  # fmt: skip
    run = KVBench(llm(), "M", [*settings, BenchSetting.parse("store=int8")], ("copy",), 1)
    lines = {line["setting"]: line for line in run.run([], Bar.of)}
    refused = {name for name, line in lines.items() if "refused" in line}
    assert {"evict=longgen", "attend=power", "attend=zero_tuning", "decode=augment"} <= refused
    two = {"skip=unified"}  # of two layers, first and last, none is skipped
    assert refused == {one.name for one in settings if "weights=none" not in one.name} - two
    for name in refused - {"decode=c2c", "decode=kv_prediction"}:
        assert "phasewise train artefact" in lines[name]["refused"], name
    assert all("pocket-draft" in lines[name]["refused"] for name in ("decode=c2c", "decode=kv_prediction"))
    assert list(lines)[-1] == "store=int8" and "value" in lines["store=int8"]
    assert all(f"Not run: `{name}`, copy" in section(list(lines.values()), "### M") for name in refused)


def test_dense_that_cannot_be_measured_ends_it() -> None:
    with pytest.raises(UserError, match="docs@8k"):
        list(measuring("store=int8", tasks=("docs@8k",)).run([], Bar.of))
