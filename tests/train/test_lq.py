"""LQ-LoRA: the split by closed forms, the allocation against a solver, and conversions that go on to the same bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phasewise.cli.app import main
from phasewise.errors import UserError
from phasewise.load import weight_bytes
from phasewise.model.lq import LQForm, parse_lq
from phasewise.model.lq_kinds import MENU, TRIED, bits_of, decode, encode, finite
from phasewise.ops import native
from phasewise.ops.native.weights import PackedWeights, pack_blocks
from phasewise.train import few_bits, lq, lq_job
from phasewise.train.lq_job import LQJob, check, convert, matrices_of, squared_gradients
from tests.lazy import lazy
from tests.model.families import make
from tests.model.reference import save_random
from tests.serve.tiny_chat import write_tokenizer
from tests.train.test_few_bits import silent

optimize: Any = lazy("scipy.optimize")
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 330,
                         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}  # fmt: skip
TINY = make("LlamaConfig", **SIZES, tie_word_embeddings=True)
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["the quick brown fox", "jumps over", "the lazy dog", "and then", "the other thing"]
    texts = {str(i): " ".join(words[(i + j * j) % 5] for j in range(200)) for i in range(9)}
    monkeypatch.setattr(few_bits, "sources", lambda held_out: texts)
    monkeypatch.setattr(few_bits, "TEXT", 48)


def model(path: Path) -> Path:
    save_random(TINY(), path)
    write_tokenizer(path)
    return path


def matrix(outputs: int = 96, inputs: int = 128, seed: int = 0) -> Tensor:
    """Noise, and a few directions that are much larger than it."""
    draw = torch.Generator().manual_seed(seed)
    low = torch.randn(outputs, 4, generator=draw) @ torch.randn(4, inputs, generator=draw)
    return torch.randn(outputs, inputs, generator=draw) + low


def gradients(weight: Tensor) -> Tensor:
    """Of rows and columns of unlike sizes, with numbers of their own."""
    draw = torch.Generator().manual_seed(9)
    rows, columns = torch.logspace(-2, 1, len(weight)), torch.logspace(1, -2, weight.shape[1])
    return rows[:, None] * columns * (torch.rand(weight.shape, generator=draw) + 0.5)


# ---- kinds
@needs_kernels
@pytest.mark.parametrize("kind", MENU)
def test_kernels_read_the_blocks_that_are_written(kind: str) -> None:
    w = matrix(70, 384) * torch.logspace(-4, 1, 70)[:, None]
    w[5] = 0
    coded = encode(w, kind)
    layer = PackedWeights.of([pack_blocks(coded.raw.numpy(), f"{kind}/bfloat16")], None)
    assert torch.equal(layer.dense(), coded.values.bfloat16())
    assert torch.equal(decode(coded.raw.numpy(), kind), coded.values)
    assert coded.raw.numel() * 8 == round(w.numel() * bits_of(kind)) and not coded.values[5].any()
    spoilt = coded.raw.clone()
    spoilt[0, :2] = torch.tensor([0, 0x7C])  # an infinite scale
    assert finite(coded.raw.numpy(), kind) and not finite(spoilt.numpy(), kind)


@pytest.mark.parametrize("kind", MENU)
def test_of_the_scales_that_are_tried_the_best_is_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group by group, so a matrix is off by less than with any one share of the extremes; in 8 bits all groups take the
    one that cuts nothing off."""
    w = matrix(40, 256)
    best, every = lq.squared_error(w, encode(w, kind).values, None), []
    for share in TRIED:
        monkeypatch.setattr("phasewise.model.lq_kinds.TRIED", (share,))
        every.append(lq.squared_error(w, encode(w, kind).values, None))
    assert best == every[0] if kind == "Q8_0" else best < min(every)


# ---- a matrix in two
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("kind", ["INT4_64", "IQ4_NL"])
def test_errors_fall_and_end_below_those_of_the_kind_alone(kind: str, weighed: bool) -> None:
    w = matrix()
    fisher = gradients(w) if weighed else None
    found, alone = lq.split(w, kind, 6, fisher), lq.split(w, kind, 0, fisher)
    assert found.pair is not None and alone.pair is None
    assert all(after < before for before, after in zip(found.errors, found.errors[1:]))
    assert found.error < 0.8 * alone.error
    off = (w - decode(found.coded.raw.numpy(), kind) - found.pair.up.float() @ found.pair.down.float()).double()
    told = float((off.square() * (1 if fisher is None else fisher)).sum())
    assert told == pytest.approx(found.error, rel=1e-5), "what is told is the error of what is kept"


def test_the_round_before_the_error_rises_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    w, made = matrix(), list[lq.Coded]()

    def worse_in_the_third(weight: Tensor, kind: str) -> lq.Coded:
        coded = encode(weight, kind)
        made.append(coded if len(made) < 2 else coded._replace(values=coded.values + 1.0))
        return made[-1]

    monkeypatch.setattr(lq, "encode", worse_in_the_third)
    found = lq.split(w, "INT4_64", 6)
    assert len(made) == 3 and len(found.errors) == 2 and found.coded is made[1]


def test_full_rank_leaves_nothing() -> None:
    w = matrix(32, 64)
    found = lq.split(w, "INT4_64", 32)
    assert float((w - found.values()).norm() / w.norm()) < 1e-3


def test_a_pair_is_the_nearest_under_the_weights_of_rows_and_columns() -> None:
    """Written a second time: weighed, cut by an exact decomposition, weighed back."""
    w = matrix()
    fisher = gradients(w)
    ours = lq.product(lq.best_pair(w, 5, fisher))
    rows, columns = fisher.mean(1).sqrt().double(), fisher.mean(0).sqrt().double()
    u, s, v = torch.linalg.svd(rows[:, None] * w.double() * columns)
    exact = (u[:, :5] * s[:5] @ v[:5]) / rows[:, None] / columns

    def off(values: Tensor) -> float:
        return float((((w.double() - values) * rows[:, None] * columns) ** 2).sum())

    assert off(ours.double()) < 1.02 * off(exact) < 0.98 * off(lq.product(lq.best_pair(w, 5)).double())


def test_ranks_and_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"rank=97 is above that of a matrix of \[96, 128\]: choose at most 96"):
        lq.split(matrix(), "INT4_64", 97)
    spoilt = matrix()
    spoilt[3, 4] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        lq.split(spoilt, "INT4_64", 4)


# ---- the allocation
def drawn(matrices: int, seed: int) -> tuple[list[dict[str, float]], list[dict[str, int]], float]:
    rng = np.random.default_rng(seed)
    outputs = rng.integers(1, 9, matrices) * 64
    errors = [{kind: float(rng.uniform(0.5, 2) * 4.0 ** -bits_of(kind) * o) for kind in MENU} for o in outputs]
    sizes = [{kind: round(int(o) * 256 * bits_of(kind)) for kind in MENU} for o in outputs]
    return errors, sizes, float(rng.uniform(4.3, 7)) * 256 * int(outputs.sum())


@pytest.mark.parametrize("seed", range(4))
def test_no_other_choice_within_the_budget_has_a_smaller_error(seed: int) -> None:
    """Against a solver of integer programmes (scipy's HiGHS), and against one kind for all."""
    errors, sizes, budget = drawn(12, seed)
    found = lq.allocate(errors, sizes, budget, units=10**9)
    cost = np.array([each[kind] for each in errors for kind in MENU])
    size = np.array([each[kind] for each in sizes for kind in MENU])
    once = np.kron(np.eye(len(errors)), np.ones(len(MENU)))
    solved = optimize.milp(cost, integrality=np.ones(len(cost)), bounds=optimize.Bounds(0, 1),
                           constraints=[optimize.LinearConstraint(once, 1, 1),
                                        optimize.LinearConstraint(size[None], -np.inf, budget)])  # fmt: skip
    assert found.size <= budget and found.error == pytest.approx(solved.fun, rel=1e-4)
    same = lq.uniform(errors, sizes, budget)
    assert same is not None and found.error < same.error and same.size <= budget


def test_coarse_units_stay_within_the_budget() -> None:
    errors, sizes, budget = drawn(12, 5)
    exact = lq.allocate(errors, sizes, budget, units=10**9)
    coarse = lq.allocate(errors, sizes, budget, units=500)
    assert coarse.size <= budget and exact.error <= coarse.error < 1.2 * exact.error
    least = sum(min(each.values()) for each in sizes)
    assert lq.allocate(errors, sizes, least, units=500).size == least
    with pytest.raises(UserError, match="cannot be met"):
        lq.allocate(errors, sizes, least - 1)


# ---- gradients
def test_gradients_are_squared_text_by_text(tmp_path: Path) -> None:
    """The mean of squares over single texts, and not the square of their mean."""
    twin, texts = lq_job.dense.load(model(tmp_path)), [[3, 9, 40, 5, 7, 11], [8, 1, 90, 33, 2, 6]]
    (o,) = [each for each in matrices_of_model(tmp_path, 4) if each.key == "1.o"]
    found = squared_gradients(twin, texts, [o], lambda done: None)["1.o"]
    grads = []
    for text in texts:
        twin.zero_grad()
        logits = twin(torch.tensor([text]))[0, :-1]
        torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:])).backward()
        weight = twin.get_parameter(o.parts[0][0].removeprefix("model."))
        assert weight.grad is not None
        grads.append(weight.grad.clone())
    assert torch.allclose(found, (grads[0].square() + grads[1].square()) / 2, rtol=1e-3, atol=1e-12)


def matrices_of_model(path: Path, rank: int) -> Sequence[lq_job.SplitMatrix]:
    return matrices_of(lq_job.parse_config(lq_job.files_of(str(path)).settings()), rank)


# ---- conversions
FORM = LQForm(rank=4, bits=6.5, fisher=True, finetune=12)


def test_pairs_learn_what_the_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The divergence falls over the steps; the matrices in few bits stay what they were."""
    told = list[float]()

    def tuned(*args: Any) -> Any:
        for loss in real(*args):
            told.append(loss)
            yield loss

    real = lq_job.tuned
    monkeypatch.setattr(lq_job, "tuned", tuned)
    base = str(model(tmp_path / "base"))
    before = convert(LQJob(base, tmp_path / "before", LQForm(4, 6.5, True, 0), tokens=300), silent)
    after = convert(LQJob(base, tmp_path / "after", FORM, tokens=300), silent)
    assert before == after and sum(told[-4:]) < 0.95 * sum(told[:4])
    plain, learned = (load_file(tmp_path / each / "model.safetensors") for each in ("before", "after"))
    moved = {name for name in plain if not torch.equal(plain[name], learned[name])}
    assert moved and all(name.startswith("lq.") for name in moved)


def test_a_conversion_that_is_cut_short_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lq_job, "SAVED", 2)
    base = str(model(tmp_path / "base"))
    whole = convert(LQJob(base, tmp_path / "whole", FORM, tokens=300), silent)
    assert [(each.layer, each.name) for each in whole.errors[:5]] == [(0, "qkv"), (0, "o"), (0, "gate_up"),
                                                                      (0, "down"), (1, "qkv")]  # fmt: skip
    assert whole.bits <= 6.5 and whole.same is not None and whole.choice.error <= whole.same.error

    def dies_after(of: Any, name: str, calls: int) -> Any:
        real, count = getattr(of, name), []

        def killed(*told: Any) -> Any:
            count.append(told)
            if len(count) > calls:
                raise KeyboardInterrupt
            return real(*told)

        return killed

    job = LQJob(base, tmp_path / "cut", FORM, tokens=300)
    # between matrices; after two layers that are split
    for of, name, calls in ((lq_job._Run, "_tried", 3), (lq_job, "save_whole", 2)):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(of, name, dies_after(of, name, calls))
            convert(LQJob(**{**vars(job), "resume": job.aside.exists()}), silent)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(lq_job._Run, "_layers", dies_after(lq_job._Run, "_layers", 0))
        real = lq_job.tuned

        def half(*args: Any) -> Any:
            for number, loss in enumerate(real(*args)):
                if number == 5:
                    raise KeyboardInterrupt
                yield loss

        patched.setattr(lq_job, "tuned", half)
        convert(LQJob(**{**vars(job), "resume": True}), silent)
    assert (job.aside / "tuning.pt").is_file() and not job.out.exists()
    with pytest.raises(UserError, match=r"cut\.parts holds a conversion that was cut short: add --resume"):
        convert(job, silent)
    with pytest.raises(UserError, match="was begun with tokens 300, not 400: resume with the same, or remove it"):
        convert(LQJob(base, job.out, FORM, tokens=400, resume=True), silent)
    again = convert(LQJob(**{**vars(job), "resume": True}), silent)
    assert again == whole and not job.aside.exists()
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (job.out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@needs_kernels
def test_the_command_tells_bits_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = model(tmp_path / "base"), tmp_path / "out"
    with pytest.raises(SystemExit) as left:
        main(["convert", "weights", str(base), str(out), "--weights", "lq:rank=4,bits=6.5,fisher=false",
              "--windows", "0"])  # fmt: skip
    assert not left.value.code
    told = capsys.readouterr().out
    assert "bits a weight with scales and pairs" in told and "below that of" in told
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    stored = sum(
        t.nbytes for name, t in load_file(out / "model.safetensors").items() if "lq." in name or "_blocks" in name
    )
    count = sum(each.shape[0] * each.shape[1] for each in matrices_of_model(base, 4))
    assert said["rank"] == 4 and stored * 8 / count <= 6.5
    rest = weight_bytes(str(base), "bfloat16") - count * 2
    assert weight_bytes(str(out), None) == stored + rest


WRONG = [
    ("lq:rnk=4", "lq has no knob 'rnk'. Did you mean rank"),
    ("lq:rank=-1", "rank=-1 is below 0"),
    ("lq:bits=nan", "bits='nan' is not a finite number"),
    ("lq:bits=0", "bits=0 must be a positive number"),
    ("lq:rank=0,finetune=5", "rank=0 has none"),
    ("lq:rank=many", "rank='many' is not a valid int"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_is_written_wrong_is_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_lq(text)


def test_what_a_model_has_no_room_for_is_named(tmp_path: Path) -> None:
    config = lq_job.parse_config(lq_job.files_of(str(model(tmp_path))).settings())
    assert parse_lq("int4:group=64") is None and parse_lq(str(FORM)) == FORM
    with pytest.raises(UserError, match=r"rank=300 is above that of 0\.qkv \[256, 128\]: choose at most 128"):
        check(config, LQForm(300, 8), "here")
    with pytest.raises(UserError, match=r"bits=3\.5 cannot be met: pairs of rank=4 take 0\.\d+ bits a weight, and the "
                                        r"smallest kinds 4\.12: choose bits=4\.\d+ or more"):  # fmt: skip
        check(config, LQForm(4, 3.5), "here")
