"""Every system file is one, says what it must say, and its counters are their closed forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from phasewise import catalog
from phasewise.errors import Untrained, UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.options import parse
from phasewise.reproduce import index
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.panel import FAR
from phasewise.reproduce.runner import reproduce, stages
from phasewise.reproduce.system import Part, Setting, System
from phasewise.reproduce.systems import cachegen, hydragen, kivi, streaming_llm
from tests.seeds import draw

NAMES = index.names()
REPORTS = Path(__file__).parents[2] / "docs" / "results" / "reproduced.json"
WANTED = {
    "sarathi_serve", "fastgen", "layered_prefill", "distserve", "splitwise", "semi_pd", "cachegen", "hydragen",
    "streaming_llm", "unified_layer_skipping", "sdar", "snapkv", "quest", "prompt_lookup", "draft_model",
    "token_recycling", "aggressive", "retrieval", "rasd", "rsd", "dyspec", "spectr", "mdsd", "easyspec", "rapid",
    "pearl", "lookahead", "aded", "swift", "pyramidkv", "adakv", "h2o", "tova", "keyformer", "double_sparsity",
    "token_select", "instinfer", "infllm", "tidal", "zero_tuning", "kivi", "gear", "compress_kv_heads", "zipvl",
    "zipvl_mixed", "zipcache", "lazyllm", "pie", "longgen", "power", "kv_prediction", "c2c", "loopserve", "rlkv",
    "augment", "flover", "fastdraft", "medusa", "hydra", "mtp", "eagle", "fspad", "chimera", "clover", "diffuspec",
    "falcon", "contrastive", "momentum", "jsonschemabench", "judge", "lq", "nm", "specdec", "codebook",
}  # fmt: skip


UNJUDGED = {  # promised by the paper, and judged by nothing here: such a verdict says so, and is at most *partly*
    "c2c": {"time"}, "cachegen": {"time"}, "rapid": {"time"},
}  # fmt: skip
UNTRAINED = {  # need weights, of which counters do not care what they are
    "longgen": "evict", "power": "attend", "kv_prediction": "decode", "c2c": "decode", "rlkv": "evict",
    "augment": "decode", "hamburger": "decode",
}  # fmt: skip


TIMED_APART = {"pearl"}  # its attempts take times themselves, on a core for each model


def test_every_system_is_found() -> None:
    assert set(NAMES) >= WANTED


def test_unknown_systems_are_named_with_near_ones() -> None:
    with pytest.raises(UserError, match="unknown system 'snapvk'. Did you mean snapkv"):
        index.system("snapvk")


def test_what_a_check_is_called_needs_no_other_line() -> None:
    """Names stand alone among the reasons of a verdict, so that none may lean on the line before it."""
    for name in NAMES:
        system = index.system(name)
        checks = *system.counters, *system.savings, *system.attempts, *system.timings
        assert not [each.name for each in checks if each.name.startswith("the same")], name


def test_a_system_says_what_it_must() -> None:
    for name in NAMES:
        system = index.system(name)
        assert isinstance(system, System)
        assert system.paper.arxiv or system.paper.where
        assert any(c.isdigit() for c in system.claim) or "figures only" in system.claim, "a claim has numbers"
        assert system.conditions and system.control_is and system.counters
        assert system.savings or system.quality or system.timings, "nothing of the claim would be examined"
        controls = [saving for saving in system.savings if saving.against == "control"]
        controls += [timing for timing in system.timings if timing.against == "control" and not timing.price]
        controls += [quality for quality in system.quality if not quality.alone]
        controls += [attempt for attempt in system.attempts if attempt.part == "control"]
        assert controls, "nothing is held against the control"
        assert all(attempt.part in get_args(Part) for attempt in system.attempts)
        assert all((attempt.of is not None) == (attempt.part == "control") for attempt in system.attempts)
        assert all(attempt.model for attempt in system.attempts if "answers" in (attempt.part, attempt.of))
        assert system.control != system.method and system.control != system.baseline
        assert all(timing.tokens or timing.seconds for timing in system.timings)
        assert system.timings or name in TIMED_APART, "nothing says what it is worth on the clock"
        assert 20 < len(system.line) <= 120 and system.promises
        untimed = replace(system, timings=(), attempts=tuple(a for a in system.attempts if a.part != "time"))
        assert stages(system, Scale(time=False)) == stages(untimed, Scale())


BUDGETS = {  # rows that a token reads or a prompt keeps, by a number in a knob
    "quest": ("budget",), "double_sparsity": ("k",), "token_select": ("k", "first", "local"), "tidal": ("k",),
    "moba": ("blocks",), "infllm": ("topk", "window"), "loopserve": ("budget",), "longgen": ("window",),
    "streaming": ("window",),
}  # fmt: skip
FREE = {"weights", "model", "dense_len"}  # knobs that a timed setting may have otherwise: who drafts, what was learned


def knobs(setting: Setting) -> dict[str, str]:
    """Every knob that a setting names, with the method's."""
    found = {}
    for verb, spelled in setting.verbs.items():
        method, _, rest = spelled.partition(":")
        found[verb] = method
        for each in rest.split(",") if "(" not in rest else [rest]:
            name, _, value = each.partition("=")
            found[name] = value.replace("pocket-draft-wide", "pocket-draft")
    return {name: value for name, value in found.items() if name and name not in FREE}


def rows(setting: Setting, names: tuple[str, ...]) -> float:
    return sum(float(knobs(setting)[name]) for name in names)


def test_what_is_timed_is_what_is_judged() -> None:
    """A judged clock has the judged method, at the same knobs; rows in a number are no smaller a share of the text."""
    for name in NAMES:
        system = index.system(name)
        for timing in system.timings:
            timed = timing.settings.get("method", system.method)
            method = next(iter(timed.verbs.values()), "").partition(":")[0]
            if timing.price or (timing.load is not None and method == "token_select"):
                continue
            mine, judged = knobs(timed), knobs(system.method)
            sized = BUDGETS.get(method, ())
            assert {k: v for k, v in mine.items() if k not in sized} == {
                k: v for k, v in judged.items() if k not in sized
            }
            if not sized or not timing.tokens or name in ("longgen",):
                continue
            for quality in system.quality:
                if quality.model == "pocket" and "method" in quality.settings:
                    share = rows(quality.settings["method"], sized) / FAR
                    assert rows(timed, sized) / timing.tokens >= 0.95 * share, (name, timing.name)


def test_every_kind_that_is_promised_is_judged_or_the_verdict_says_so() -> None:
    """A price is no clock, and arithmetic is no check; what is judged is promised."""
    for name in NAMES:
        system = index.system(name)
        parts = {"answers"} if system.quality else set()
        parts |= {"cost" for saving in system.savings if saving.against != "control"}
        parts |= {"time" for timing in system.timings if not timing.price and timing.against != "control"}
        parts |= {attempt.part for attempt in system.attempts if attempt.part in ("answers", "cost", "time")}
        assert parts - {"cost"} <= set(system.promises), name
        unjudged = set(system.promises) - parts - ({"cost"} if system.arithmetic else set())
        assert unjudged <= UNJUDGED.get(name, set()), name


def test_methods_are_in_the_catalogue_and_controls_are_not() -> None:
    for name in NAMES:
        system = index.system(name)
        for setting in system.roles.values():
            parse(setting.verbs)
        assert not system.method.objects and not system.baseline.objects, "what is claimed is what users can have"
        listed = {method for _, _, method in catalog.every()}
        controls = system.control.objects.values()
        inner = [control.draft if isinstance(control, Speculative) else control for control in controls]
        assert not any(type(control) in listed for control in inner)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch, Lab.open(Scale(quick=True, time=False)) as made:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield made


def here(setting: Setting) -> Setting:
    """In this thread."""
    return replace(setting, cluster="inline")


def counting(system: System) -> System:
    """Counters and savings alone, all in this thread."""
    return replace(
        system, method=here(system.method), baseline=here(system.baseline), control=here(system.control),
        rivals={}, savings=tuple(s for s in system.savings if s.against != "rivals" and not s.model),
        quality=(), attempts=(), timings=(),
    )  # fmt: skip


def drawn(setting: Setting, verb: str) -> Setting:
    """With weights from which nothing was learned."""
    method = setting.verbs[verb]
    return replace(setting, verbs={verb: method + (",weights" if ":" in method else ":weights") + "=random:0"})


def learned_nothing(control: Setting, verb: str) -> Setting:
    """One that is made of the method itself, likewise."""
    made = control.objects.get(verb)
    if made is None:
        return control
    return replace(control, objects={verb: replace(made, of=replace(made.of, weights="random:0"))})


@pytest.mark.parametrize("name", draw(__name__).sample([*UNTRAINED], 2))
def test_what_is_not_trained_is_not_tried(lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it stops, and says what to train; among others it has failed. Controls have other weights, or none."""
    monkeypatch.setattr("phasewise.model.artefacts.FOLDER", "nowhere")
    system = counting(index.system(name))
    assert not system.quality and index.system(name).quality
    others = [each.endswith(("weights=none", "weights=random:0")) for each in system.control.verbs.values()]
    assert system.control.objects or others == [True]
    with pytest.raises(Untrained, match=f"phasewise train artefact {UNTRAINED[name]}.{name}"):
        reproduce(name, system, lab)
    (check,) = reproduce(name, system, lab, among=True).checks
    assert not check.passed and "phasewise train artefact" in check.measured


def as_good(name: str) -> set[str]:
    """The checks in which a control saved as much, by the recorded report: a finding, which small loads may repeat."""
    reports = json.loads(REPORTS.read_text(encoding="utf-8"))["reports"]
    checks = [check for report in reports if report["name"] == name for check in report["checks"]]
    return {check["name"] for check in checks if check["part"] == "control" and check["passed"] is False}


@pytest.mark.parametrize("name", draw(__name__).sample(NAMES, 8))
def test_counters_are_their_closed_forms(lab: Lab, name: str) -> None:
    """Of some systems, others every day, on small loads. Exact systems give the same tokens; controls save less, but
    for those that were found not to."""
    system = counting(index.system(name))
    if name in UNTRAINED:
        verb = UNTRAINED[name]
        system = replace(system, method=drawn(system.method, verb), control=learned_nothing(system.control, verb))
    report = reproduce(name, system, lab)
    failed = [c for c in report.checks if c.part in ("exact", "counter", "control") and not c.passed]
    wrong = [str(c) for c in failed if c.part != "control" or c.name not in as_good(name)]
    assert not wrong
    assert sum(c.part == "counter" for c in report.checks) == len(system.counters)
    assert sum(c.part == "exact" for c in report.checks) == system.exact


def test_placements_count_the_same_between_processes(lab: Lab) -> None:
    system = replace(index.system("distserve"), timings=())
    report = reproduce("distserve", system, lab)
    assert system.method.cluster == "processes"
    assert not [str(c) for c in report.checks if c.part in ("exact", "counter") and not c.passed]


def test_an_ideal_code_takes_the_entropy() -> None:
    assert cachegen.bits(np.array([4, 4, 0])) == 8.0
    assert cachegen.bits(np.array([8, 0])) == 0.0
    assert cachegen.bits(np.array([1, 1, 2])) == pytest.approx(6.0)


@pytest.mark.parametrize("fine", [True, False])
def test_the_error_bound_of_cachegen_can_fail(lab: Lab, monkeypatch: pytest.MonkeyPatch, fine: bool) -> None:
    """If the coder took coarser steps than its level says, the attempt would see it."""
    if not fine:
        monkeypatch.setattr(
            "phasewise.methods.store._cachegen.chunked.Chunked._steps", lambda self, level, layer: (1, 1)
        )
    assert cachegen.off(lab).passed is fine


@pytest.mark.parametrize("coarser", [True, False])
def test_the_levels_of_cachegen_must_tell(lab: Lab, monkeypatch: pytest.MonkeyPatch, coarser: bool) -> None:
    """If every level rounded alike, the attempt would see it."""
    if not coarser:
        monkeypatch.setattr(
            "phasewise.methods.store._cachegen.chunked.Chunked._steps", lambda self, level, layer: (15, 15)
        )
    assert cachegen.ladder(lab).passed is coarser


@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ((0.0, 0.001, 0.002, 0.003, 0.004), True),
        ((0.0, 0.006, 0.007, 0.008, 0.009), False),  # the finest is not as good as rows as they are
        ((0.0, 0.0, 0.002, 0.003, 0.004), False),  # the finest does nothing at all
        ((0.0, 0.001, 0.003, 0.002, 0.004), False),  # a coarser level is better
        ((0.0, -0.001, -0.002, -0.003, -0.004), False),  # losses fall
    ],
)
def test_what_the_levels_of_cachegen_must_do(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, more: tuple[float, ...], passes: bool
) -> None:
    found = [[2.0 + each + 1e-4 * (i % 2) * each for i in range(50)] for each in more]
    monkeypatch.setattr(cachegen.blocks, "nats", lambda lab, setting, stretches: found.pop(0))
    assert cachegen.ladder(lab).passed is passes


@pytest.mark.parametrize("shared", [True, False])
def test_hydragens_bytes_are_those_of_tensors(lab: Lab, shared: bool) -> None:
    """Without a prefix cache each request has its own copy, and the attempt sees it."""
    assert hydragen.held(lab, replace(hydragen.ON, prefix_cache=shared)).passed is shared


@pytest.mark.parametrize(("bits", "alike"), [(8, True), (2, False)])
def test_kivis_greedy_choices_are_dense_ones_in_eight_bits_and_not_in_two(lab: Lab, bits: int, alike: bool) -> None:
    assert kivi.choices(lab, bits).passed is alike


@pytest.mark.parametrize(("contexts", "worse"), [(2, True), (1, False)])
def test_dense_attention_is_worse_beyond_the_context_and_not_within(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, contexts: int, worse: bool
) -> None:
    monkeypatch.setattr(streaming_llm, "BEYOND", contexts)
    assert streaming_llm.dense(lab).passed is worse
