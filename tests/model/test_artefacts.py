"""Artefacts: found where they should be, bound to one base model and one setting, refused by name elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.known import shelf
from phasewise.known.models import KNOWN
from phasewise.load import load_model
from phasewise.methods.skip.unified import Unified
from phasewise.model import artefacts
from phasewise.model.artefacts import FOLDER, Artefact, fingerprint, load
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.train import artefacts as trainable
from tests import tiny

SHIPPED = sorted(Path(str(files("phasewise"))).glob(f"pocket/*/{FOLDER}/*.safetensors"))
FETCHED = sorted(Path(str(files("phasewise"))).glob(f"known/*/{FOLDER}/*.safetensors"))  # for models that are fetched
LARGEST, ALL = 3_000_000, 11_500_000  # bytes of one that ships, and of all
WANTED = Artefact("skip.test", {"a": (3, 5), "b": (4,)}, {"speedup": 2.0, "most": 3}, "leave it out")


def copied(to: Path) -> Model:
    """A tiny model in a folder of its own."""
    shutil.copytree(tiny.checkpoint(), to)
    return Model.load(to)


def written(path: Path, model: Model, wanted: Artefact = WANTED) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in wanted.shapes.items()}
    artefacts.save(path, wanted, tensors, fingerprint(model), "phasewise train ...")
    return tensors


def same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


def test_auto_finds_what_lies_beside_the_model(tmp_path: Path) -> None:
    model = copied(tmp_path / "model")
    assert WANTED.file == "skip.test-speedup2-most3.safetensors"
    want = written(model.files.path / FOLDER / WANTED.file, model)
    assert same(load(model, WANTED, "auto"), want)
    with safe_open(model.files.path / FOLDER / WANTED.file, framework="pt") as file:
        about = file.metadata()
    assert about["kind"] == "skip.test" and about["base"] == fingerprint(model)
    assert json.loads(about["knobs"]) == {"speedup": 2.0, "most": 3}
    assert about["command"] and about["phasewise"]
    assert Model.load(model.files.path).config == model.config, "the model itself loads as before"


def test_a_file_by_name(tmp_path: Path) -> None:
    want = written(tmp_path / "any.safetensors", tiny.model())
    assert same(load(tiny.model(), WANTED, str(tmp_path / "any.safetensors")), want)
    with pytest.raises(UserError, match=r"no such file.*phasewise train artefact skip\.test:speedup=2,most=3 --model"):
        load(tiny.model(), WANTED, str(tmp_path / "absent.safetensors"))


def test_without_one_the_error_says_how_to_train_it() -> None:
    command = rf"phasewise train artefact skip\.test:speedup=2,most=3 --model {tiny.checkpoint()} --out runs/skip\.test"
    with pytest.raises(UserError, match=rf"{command}; or leave it out"):
        load(tiny.model(), WANTED, "auto")


def test_another_models_artefact_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    written(path, tiny.model())
    other = tiny.model(seed=5)
    with pytest.raises(
        UserError, match=rf"{path} was trained for another base model.*{other.files.path}.*train artefact"
    ):
        load(other, WANTED, str(path))
    beside = copied(tmp_path / "model")
    shutil.copy(written_for(other, tmp_path), (beside.files.path / FOLDER / WANTED.file))
    with pytest.raises(UserError, match="another base model"):
        load(beside, WANTED, "auto")


def written_for(model: Model, folder: Path) -> Path:
    written(folder / "other.safetensors", model)
    (folder / "model" / FOLDER).mkdir()
    return folder / "other.safetensors"


@pytest.mark.parametrize(("other", "says"), [
    (Artefact("skip.another", WANTED.shapes, WANTED.knobs), r"trained for skip\.another, not for skip\.test"),
    (Artefact("skip.test", WANTED.shapes, {"speedup": 3.0, "most": 3}), r'trained for .*"speedup": 3\.0.*, not for'),
    (Artefact("skip.test", {"a": (3, 6), "b": (4,)}, WANTED.knobs), r"a is \(3, 6\), wanted \(3, 5\)"),
    (Artefact("skip.test", {"a": (3, 5)}, WANTED.knobs), r"b is absent, wanted \(4,\)"),
    (Artefact("skip.test", {**WANTED.shapes, "c": (1,)}, WANTED.knobs), r"c is \(1,\), wanted nothing"),
])  # fmt: skip
def test_what_was_made_for_something_else_is_refused(tmp_path: Path, other: Artefact, says: str) -> None:
    written(tmp_path / "x.safetensors", tiny.model(), other)
    with pytest.raises(UserError, match=says + r".*train artefact skip\.test"):
        load(tiny.model(), WANTED, str(tmp_path / "x.safetensors"))


def test_what_is_no_artefact_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "bare.safetensors")
    with pytest.raises(
        UserError, match=r"is no artefact of phasewise.* Train one: phasewise train artefact skip\.test"
    ):
        load(tiny.model(), WANTED, str(tmp_path / "bare.safetensors"))
    (tmp_path / "text.safetensors").write_text("not safetensors at all")
    with pytest.raises(UserError, match=r"not a readable safetensors file.* Train one: phasewise train artefact"):
        load(tiny.model(), WANTED, str(tmp_path / "text.safetensors"))


def test_random_ones_are_of_the_declared_shapes_and_follow_their_seed() -> None:
    one, again, other = (load(tiny.model(), WANTED, f"random:{seed}") for seed in (0, 0, 1))
    assert {name: tuple(value.shape) for name, value in one.items()} == dict(WANTED.shapes)
    assert same(one, again)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert all(float(value.abs().max()) > 0 for value in one.values())
    with pytest.raises(UserError, match="random:x: the seed must be a whole number"):
        load(tiny.model(), WANTED, "random:x")


def test_a_fingerprint_is_that_of_the_files(tmp_path: Path) -> None:
    """The same for every dtype a model is loaded in, and for a copy in a wider one; another for other values."""
    model = load_model("pocket")
    mine = fingerprint(model)
    assert len(mine) == 16 and int(mine, 16)
    assert fingerprint(load_model("pocket", dtype=torch.float32)) == mine
    assert fingerprint(load_model("pocket-draft")) != mine
    wide = tmp_path / "wide"
    shutil.copytree(model.files.path, wide, ignore=shutil.ignore_patterns(FOLDER))
    tensors = load_file(wide / "model.safetensors")
    save_file({name: value.float() for name, value in tensors.items()}, wide / "model.safetensors")
    assert fingerprint(Model.load(wide)) == mine
    name = "model.layers.3.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name] * 1.01}, wide / "model.safetensors")
    assert fingerprint(Model.load(wide)) != mine, "the same path, but other files"


def test_whoever_has_a_knob_for_weights_declares_them_and_can_be_trained() -> None:
    kinds = {}
    for verb, name, cls in catalog.every():
        if "weights" in catalog.knobs_of(cls):
            made = cls().artefact(tiny.model().config)
            assert made.kind == f"{verb}.{name}" and made.shapes
            optional = cls().weights == "none"  # it works without, unless it is told to use them
            untrained = optional or name == "specdec"  # its head is one of four ways to end a chain
            assert cls.needs in (("nothing", "second model") if untrained else ("trained", "calibration"))
            kinds[made.kind] = made
    assert sorted(kinds) == trainable.names() and "skip.unified" in kinds
    for kind in kinds:
        assert callable(trainable.trainer(kind))
    with pytest.raises(UserError, match=r"'skip\.unifed' needs no training or is unknown. Did you mean skip\.unified"):
        trainable.trainer("skip.unifed")


def test_unified_says_how_to_train_where_nothing_was_trained() -> None:
    def built(text: str) -> Any:
        return tiny.engine({"skip": text})

    with pytest.raises(UserError, match=r"train artefact skip\.unified:speedup=2 --model .*or say weights=none"):
        built("unified")
    with pytest.raises(UserError, match=r"skip\.unified:speedup=1\.5 --model"):
        built("unified:speedup=1.5")
    for text in ("unified:weights=none", "unified:weights=random:7", "unified:speedup=1"):
        built(text)


def test_the_pocket_models_own_is_shipped_and_found() -> None:
    model = load_model("pocket")
    wanted = Unified().artefact(model.config)
    found = load(model, wanted, "auto")
    assert all(value.dtype == torch.bfloat16 for value in found.values())
    assert any(float(found[name].abs().max()) > 0 for name in found if name.endswith(".b")), "it was trained"
    (path,) = model.files.path.glob(f"{FOLDER}/{wanted.file}")
    assert path.stat().st_size < 1 << 20


def test_a_copy_of_the_pocket_model_finds_what_ships_with_the_package(tmp_path: Path) -> None:
    shutil.copytree(load_model("pocket").files.path, tmp_path / "copy", ignore=shutil.ignore_patterns(FOLDER))
    copy = Model.load(tmp_path / "copy")
    wanted = Unified().artefact(copy.config)
    assert same(load(copy, wanted, "auto"), load(load_model("pocket"), wanted, "auto"))


# ---- all that ships
@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Like the pocket model in everything but a few of its numbers."""
    folder = tmp_path_factory.mktemp("another") / "model"
    shutil.copytree(load_model("pocket").files.path, folder, ignore=shutil.ignore_patterns(FOLDER))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    yield Model.load(folder)


def setting_of(path: Path) -> tuple[str, str, dict[str, Any]]:
    """The verb, the method and the knobs that an artefact was trained for."""
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    verb, _, name = about["kind"].partition(".")
    return verb, name, json.loads(about["knobs"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_whatever_ships_is_refused_by_another_model(path: Path, another: Model) -> None:
    """Both fingerprints are named, and what trains one; the model that it ships for takes it."""
    verb, name, knobs = setting_of(path)
    text = f"{name}:" + ",".join(f"{knob}={value}" for knob, value in {**knobs, "weights": path}.items())
    beside = {"draft": "prompt_lookup"} if verb == "verify" else {}

    def built(model: Model) -> Any:
        return Builder(model, parse({verb: text, **beside}), Limits(prefix_cache=False), load=load_model).build()

    pocket = load_model("pocket")
    mine, theirs = fingerprint(another), fingerprint(pocket)
    says = f"{path} was trained for another base model ({theirs}) than the one in {another.files.path} ({mine}). "
    train = f"Train one: phasewise train artefact {verb}.{name}"
    with pytest.raises(UserError, match=re.escape(says + train) + f".* --model {re.escape(str(another.files.path))}"):
        built(another)
    built(pocket).close()


@cache
def fetched(name: str) -> Model:
    return load_model(name)


@pytest.mark.parametrize("path", FETCHED, ids=lambda path: path.stem)
def test_what_ships_for_a_known_model_is_found_by_it(path: Path) -> None:
    name, (verb, method, knobs) = path.parent.parent.name, setting_of(path)
    text = ":".join((method, ",".join(f"{knob}={value}" for knob, value in knobs.items()))).rstrip(":")
    made: Any = parse({verb: text})[verb]
    if made.weights == "none":  # a method that does without them, unless it is asked
        text = f"{text},weights=auto" if knobs else f"{text}:weights=auto"
        made = parse({verb: text})[verb]
    assert not made.weights or made.weights == "auto", "it would not be looked for"
    if not shelf.found(KNOWN[name]):
        pytest.skip(f"{name} has not been fetched")
    model = fetched(name)
    wanted = made.artefact(model.config)
    assert wanted.file == path.name and same(load(model, wanted, "auto"), load_file(path))
    Builder(model, parse({verb: text}), Limits(prefix_cache=False), load=load_model).build().close()


def test_what_ships_is_small() -> None:
    sizes = {path: path.stat().st_size for path in (*SHIPPED, *FETCHED)}
    assert len(sizes) > 5 and max(sizes.values()) <= LARGEST and sum(sizes.values()) <= ALL, sizes
