"""decode.kv_prediction: a prompt's rows against maps worked out row by row, what is computed of it, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.methods.decode import _second
from phasewise.methods.decode import kv_prediction as module
from phasewise.methods.decode.kv_prediction import AUX, KVPrediction, Maps, Predicting, layer_map
from phasewise.model import artefacts
from phasewise.model.artefacts import fingerprint
from phasewise.model.model import Model
from phasewise.model.norm import HeadNorm
from phasewise.ops import native
from phasewise.reproduce.systems.kv_prediction import products
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, tiny, uncached
from tests.skip.test_unified import ByHand

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
KNOBS = "kv_prediction:model=tiny-draft,weights=random:0,least=2,piece=16"
VERBS = {"decode": KNOBS}
N = 12
(TEXT,) = tiny.prompts(50)


def built(verbs: dict[str, str] | None = None, of: Model | None = None, **limits: Any) -> Engine:
    engine = tiny.engine(VERBS if verbs is None else verbs, of=of, **limits)
    assert isinstance(engine, Engine)
    return engine


def serve(engine: Any, prompt: Sequence[int], params: Params | None = None) -> Request:
    (request,) = tiny.run(engine, [prompt], params or tiny.greedy(N))
    assert request.left is not None and request.left.how == "finished"
    return request


def declared(aux: Model, name: str = "tiny-draft") -> artefacts.Artefact:
    return KVPrediction(name).artefact(tiny.model().config, aux.config, fingerprint(aux))


# ---- by hand
def merged(aux: Model, tensors: Mapping[str, Tensor], to: Path) -> Model:
    """The auxiliary with W + B A written out as a checkpoint."""
    shutil.copytree(aux.files.path, to)
    weights = load_file(to / "model.safetensors")
    places = {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "o": ["self_attn.o_proj"],
              "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}  # fmt: skip
    for layer in range(aux.config.layers):
        for linear, names in places.items():
            change, row = tensors[f"{AUX}{layer}.{linear}.b"] @ tensors[f"{AUX}{layer}.{linear}.a"], 0
            for name in names:
                weight = weights[f"model.layers.{layer}.{name}.weight"]
                weight += change[row : row + len(weight)]
                row += len(weight)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return Model.load(to)


@torch.inference_mode()
def by_hand(
    folder: Path, prompt: Sequence[int], n: int = N, seed: int = 0, own: tuple[str, Model] | None = None
) -> list[int]:
    """Row by row and layer by layer: the auxiliary over all but the last token, maps, and the model over these. `own`:
    the name of an auxiliary that is made of the model's layers, and a checkpoint of these."""
    base = tiny.model()
    name, small = own or ("tiny-draft", tiny.load("tiny-draft"))
    made = KVPrediction(name).artefact(base.config) if own else declared(small)
    tensors = artefacts.random(made, str(seed))
    aux = merged(small, tensors, folder / "merged")
    read, slow = ByHand(aux), ByHand(base)
    for at, token in enumerate(prompt[:-1]):
        read.run(token, at, range(aux.config.layers))
    for layer in range(base.config.layers):
        of = layer * aux.config.layers // base.config.layers
        slow.rows[layer] = []
        for at, (k, v) in enumerate(read.rows[of]):
            k = aux.rotate(of, k[:, None], -at)[:, 0]
            new = [
                tensors[f"{side}.weight"][layer] @ each.flatten() + tensors[f"{side}.bias"][layer]
                for side, each in (("k", k), ("v", v))
            ]
            k, v = (each.view(base.config.kv_heads, -1) for each in new)
            slow.rows[layer].append((base.rotate(layer, k[:, None], at)[:, 0], v))
    token, out = prompt[-1], list[int]()
    for i in range(n):
        token = slow.run(token, len(prompt) - 1 + i, range(base.config.layers))
        out.append(token)
    return out


@pytest.mark.parametrize("length", [2, 17, 50])
def test_tokens_are_those_of_rows_mapped_by_hand(tmp_path: Path, length: int) -> None:
    mine = serve(built(), TEXT[:length]).out
    assert mine == by_hand(tmp_path, TEXT[:length])
    assert mine != oracle.greedy(tiny.checkpoint(), TEXT[:length], N)[0], "random maps give another answer"


def written(keep: Sequence[int], to: Path) -> Model:
    """A checkpoint of these layers of the tiny model."""
    shutil.copytree(tiny.model().files.path, to)
    old, new = load_file(to / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in old.items():
        root, _, rest = name.removeprefix("model.layers.").partition(".")
        if not name.startswith("model.layers."):
            new[name] = tensor
        elif int(root) in keep:
            new[f"model.layers.{keep.index(int(root))}.{rest}"] = tensor
    save_file(new, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(keep)}))
    return Model.load(to)


@pytest.mark.parametrize(("name", "keep"), [("own:0.5", [0, 2]), ("own:0.75", [0, 2, 3]), ("own:0.1", [0])])
def test_an_auxiliary_of_the_models_own_layers_is_the_checkpoint_without_the_others(
    tmp_path: Path, name: str, keep: list[int]
) -> None:
    assert KVPrediction(name).kept(4) == keep
    small = written(keep, tmp_path / "few")
    verbs = {"decode": KNOBS.replace("tiny-draft", name)}
    mine, runtime = serve(built(verbs), TEXT[:17]).out, built(verbs).parts.phases[0].decode
    if len(keep) in (1, 2):  # the twin maps four layers from one or two
        assert mine == by_hand(tmp_path, TEXT[:17], own=(name, small))
    aux: Any = runtime.reader.companion.model  # type: ignore[attr-defined]
    tensors = artefacts.random(KVPrediction(name).artefact(tiny.model().config), "0")
    again = merged(small, tensors, tmp_path / "again")
    torch.testing.assert_close(uncached.logits(aux, TEXT), uncached.logits(again, TEXT), **CLOSE)


def test_with_all_of_them_and_maps_that_change_nothing_rows_are_the_models_own(tmp_path: Path) -> None:
    wanted = KVPrediction("own:1").artefact(tiny.model().config)
    tensors = {name: torch.zeros(shape) for name, shape in wanted.shapes.items()}
    for side in "kv":
        tensors[f"{side}.weight"] += torch.eye(tensors[f"{side}.weight"].shape[-1])
    path = tmp_path / "own.safetensors"
    artefacts.save(path, wanted, tensors, fingerprint(tiny.model()), "by hand")
    engine = built({"decode": f"kv_prediction:model=own:1,weights={path},least=2,piece=16"})
    assert serve(engine, TEXT).out == oracle.greedy(tiny.checkpoint(), TEXT, N)[0]


@pytest.mark.parametrize("name", ["own:0", "own:1.5", "own:half"])
def test_what_is_no_share_of_the_layers_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"kv_prediction: model={name}: name a share of the model's own layers above 0"):
        KVPrediction(name)


def test_layers_are_taken_as_the_paper_takes_them() -> None:
    """Of 20 for 28, the first eight twice; of half as many, each twice."""
    assert layer_map(28, 20) == [j for j in range(8) for _ in "12"] + list(range(8, 20))
    assert layer_map(8, 4) == [0, 0, 1, 1, 2, 2, 3, 3] and layer_map(6, 6) == list(range(6))
    assert layer_map(4, 8) == [0, 2, 4, 6] and layer_map(5, 1) == [0] * 5
    for layers in range(1, 20):
        for aux in range(1, 20):
            found = layer_map(layers, aux)
            assert len(found) == layers and sorted(found) == found and found[-1] < aux
            assert aux > layers or set(found) == set(range(aux))


# ---- what the card says
def identity(model: Model, path: Path) -> Path:
    """Maps that change nothing, with nothing added to the auxiliary."""
    wanted = declared(model, "tiny")
    tensors = {name: torch.zeros(shape) for name, shape in wanted.shapes.items()}
    for side in "kv":
        tensors[f"{side}.weight"] += torch.eye(tensors[f"{side}.weight"].shape[-1])
    artefacts.save(path, wanted, tensors, fingerprint(model), "by hand")
    return path


def test_the_model_itself_and_maps_that_change_nothing_give_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can have this: the auxiliary is never the model. It tells whether all rows are where they belong."""
    path = identity(tiny.model(), tmp_path / "identity.safetensors")
    verbs = {"decode": f"kv_prediction:model=tiny,weights={path},least=2,piece=16"}
    with pytest.raises(UserError, match="auxiliary 'tiny' is the model itself: choose another one"):
        built(verbs)
    monkeypatch.setattr(_second, "same", lambda one, other: False)
    for length in (2, 17, 50):
        assert serve(built(verbs), TEXT[:length]).out == oracle.greedy(tiny.checkpoint(), TEXT[:length], N)[0]
    mine, true = (rows_of(built(each)) for each in (verbs, {}))
    for (k, v), (want_k, want_v) in zip(mine, true):
        torch.testing.assert_close(k, want_k, **CLOSE)
        torch.testing.assert_close(v, want_v, **CLOSE)


@pytest.mark.parametrize("length", [2, 17, 50])
@pytest.mark.parametrize("predicted", [True, False])
def test_products_before_the_first_token_are_the_closed_form(length: int, predicted: bool) -> None:
    """All matrix products that torch multiplies, operator by operator: the auxiliary's rows, the maps, one row of the
    model, and the head's for one token. Attention is the kernels'."""
    engine, model, aux = built(VERBS if predicted else {}, prefix_cache=False), tiny.model(), tiny.load("tiny-draft")
    request = Request(TEXT[:length], tiny.greedy(1))
    engine.add(request)
    with FlopCounterMode(display=False) as counted:
        while request.left is None:
            engine.step()
    every = counted.get_flop_counts()["Global"]
    found = sum(every.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    rows = (1, length - 1) if predicted else (length, 0)
    assert (engine.counters.prompt_rows, engine.counters.recalled) == rows
    assert found == 2 * (products(model.config, aux.config, *rows) + model.config.hidden * model.config.vocab)


def rows_of(engine: Engine) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all layers once the first token is there."""
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    while not request.n_out:
        engine.step()
    assert request.kv is not None
    parts = [layer.read()[0] for layer in request.kv.layers]
    assert all(part.plain for part in parts)
    found = [(part.k.clone(), part.v.clone()) for part in parts]
    engine.cancel(request)
    return found


@pytest.mark.parametrize("length", [2, 17, 18, 200])
def test_the_model_computes_one_row_of_a_prompt(length: int) -> None:
    """And the auxiliary all but the last, in pieces; the rest of the work is one map of each side and layer."""
    (prompt,), engine = tiny.prompts(length), built()
    request = serve(engine, prompt, tiny.greedy(1))
    runtime: Any = engine.parts.phases[0].decode
    assert engine.counters.rows == engine.counters.prompt_rows == 1
    assert engine.counters.row_layers == tiny.model().config.layers
    assert request.recalled == engine.counters.recalled == length - 1
    assert runtime.reader.companion.own.rows == length - 1
    assert engine.counters.draft_forwards == -(-(length - 1) // 16)


def test_short_prompts_are_computed() -> None:
    engine = built({"decode": KNOBS.replace("least=2", "least=51")})
    request = serve(engine, TEXT)
    assert [request.out] == tiny.plain([TEXT], tiny.greedy(N)) and not request.recalled
    assert engine.counters.draft_forwards == 0
    assert serve(engine, [*TEXT, 5]).recalled == 50


def test_the_models_own_weights_stay() -> None:
    models = [tiny.load("tiny-draft"), tiny.model()]
    before = [uncached.logits(model, TEXT) for model in models]
    engine = built()
    serve(engine, TEXT)
    runtime: Any = engine.parts.phases[0].decode
    aux = runtime.reader.companion.model
    assert aux is not models[0], "the tuned one is a model of its own"
    assert (uncached.logits(aux, TEXT) - before[0]).abs().max() > 0.1
    assert all(torch.equal(uncached.logits(model, TEXT), was) for model, was in zip(models, before))


def test_predicted_keys_are_normalised_as_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And turned after that, not before."""
    base, aux = tiny.model(), tiny.load("tiny-draft")
    weight = torch.rand(base.config.heads + base.config.kv_heads, base.config.head_dim) + 0.5
    monkeypatch.setattr(base.layers[1], "qk_norm", HeadNorm(weight, 1e-6))
    tensors = artefacts.random(declared(aux), "3")
    at, rows = 5, [(torch.randn(2, 4, 12), torch.randn(2, 4, 12)) for _ in range(aux.config.layers)]
    made = Maps(base, aux, tensors)(rows, at)
    for r in range(4):
        k = aux.rotate(0, rows[0][0][:, r : r + 1], -(at + r))[:, 0].flatten()
        k = (tensors["k.weight"][1] @ k + tensors["k.bias"][1]).view(base.config.kv_heads, -1)
        k = k / (k.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight[base.config.heads :]
        torch.testing.assert_close(made[1][0][:, r], base.rotate(1, k[:, None], at + r)[:, 0], **CLOSE)


# ---- who else is there
def test_where_there_is_little_room_requests_make_way() -> None:
    texts = tiny.prompts(90, 70, 100, 80, seed=2)
    alone = [serve(built(), text).out for text in texts]
    runtime = built().recipes[""]
    engine = built(kv_bytes=int(2.2 * runtime.need(112 + runtime.margin)))
    assert tiny.outs(tiny.run(engine, texts, tiny.greedy(N))) == alone


def test_prompts_are_nobodys_prefix_and_leave_nothing() -> None:
    engine = built()
    outs = [serve(engine, TEXT).out for _ in range(2)]
    assert outs[0] == outs[1] and engine.counters.prefix_hits == 0
    first = Request(TEXT, tiny.greedy(1))
    engine.add(first)
    engine.step()
    assert first.left is not None and engine.store.left(first.id) is None and engine.kv_bytes == 0


def test_what_the_auxiliary_held_is_given_back_before_the_first_token() -> None:
    engine = built(prefix_cache=False)
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    engine.step()
    assert request.n_out == 1 and request.kv is not None
    assert engine.kv_bytes == request.kv.bytes and not request.state
    engine.cancel(request)


@pytest.mark.skipif(native.library() is None, reason="torch's own kernels round by the number of rows")
def test_in_bfloat16_all_steps_are_native_and_mates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.watched import passes

    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    small = Model.load(tiny.checkpoint(hidden=64, layers=2, seed=1), dtype=torch.bfloat16)
    monkeypatch.setattr(tiny, "load", lambda name: small)
    outs = []
    for others in ([], tiny.prompts(33, 50)):
        engine = built(of=model)
        made = passes(monkeypatch)
        requests = [Request(text, tiny.greedy(N)) for text in (TEXT, *others)]
        for request in requests:
            engine.add(request)
        tiny.finish(engine, requests)
        outs.append(requests[0].out)
        assert made and all(each.whole for each in made), "the auxiliary's too: what was learned is in its weights"
    assert outs[0] == outs[1]


# ---- what is refused
@pytest.mark.parametrize(("knobs", "says"), [
    ({"least": 1}, "least=1 must be at least 2 tokens"), ({"piece": 0}, "piece=0 must be at least 1 tokens"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_bound(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"kv_prediction: {says}"):
        KVPrediction(**knobs)


def test_weights_that_are_missing_or_another_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"phasewise train artefact decode.kv_prediction:model=tiny-draft --model"):
        built({"decode": "kv_prediction:model=tiny-draft"})
    other = tiny.model(layers=2, seed=7)
    wanted, path = declared(other), tmp_path / "other.safetensors"
    artefacts.save(path, wanted, artefacts.random(wanted, "0"), fingerprint(tiny.model()), "elsewhere")
    with pytest.raises(UserError, match="was trained with another second model"):
        built({"decode": f"kv_prediction:model=tiny-draft,weights={path}"})


def test_names_of_files_are_those_of_folders() -> None:
    made = KVPrediction("some/where/small").artefact(tiny.model().config, tiny.model().config)
    assert made.file == "decode.kv_prediction-modelsmall.safetensors"
    assert made.setting == "decode.kv_prediction:model=some/where/small"


class Odd:
    """A model of which something does not fit."""

    def __init__(self, of: Model, **config: Any) -> None:
        self.files = of.files
        values = {name: getattr(of.config, name) for name in ("vocab", "max_positions", "qk_norm", "ropes", "layers")}
        self.config = type("Config", (), values | config)


class Long:
    scheme, fixed = "dynamic", False


@pytest.mark.parametrize(("config", "said"), [
    ({"vocab": 65}, "has 65 token ids, but the model has 64: choose one with the model's own tokenizer"),
    ({"max_positions": 512}, "has a context of 512, and the model one of 1024: choose one that can read as much"),
    ({"qk_norm": "head"}, "normalises its keys, .*: choose another one"),
    ({"ropes": (Long(),)}, "rope scaling 'dynamic' of .* depends on the length .*: choose another one"),
])  # fmt: skip
def test_auxiliaries_that_do_not_fit_are_named(
    config: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load: Callable[[str], Any] = lambda name: Odd(tiny.model(layers=2, seed=1), **config)  # noqa: E731
    monkeypatch.setattr(tiny, "load", load)
    with pytest.raises(UserError, match=said):
        built()


@pytest.mark.parametrize(("more", "said"), [
    ({"evict": "snapkv"}, "decode kv_prediction takes rows of prompts from elsewhere, and evict snapkv is not shown"),
    ({"skip": "lazyllm"}, "decode kv_prediction takes rows of prompts from elsewhere, and skip lazyllm is not shown"),
])  # fmt: skip
def test_who_has_to_see_prompts_is_refused_by_name(more: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        built(VERBS | more)


def test_questions_about_rows_that_are_not_computed_are_refused() -> None:
    with pytest.raises(UserError, match="prompt_logprobs asks about rows of the prompt.*another decode method"):
        built().add(Request(TEXT, Params(max_tokens=1, prompt_logprobs=0)))


def test_a_prompt_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Maps, rows: Any, start: int) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(module.Maps, "__call__", broken)
    engine = built()
    request = Request(TEXT, tiny.greedy(N))
    engine.add(request)
    engine.step()
    assert request.left is not None and request.left.how == "failed" and engine.kv_bytes == 0
    assert isinstance(engine.parts.phases[0].decode, Predicting)
