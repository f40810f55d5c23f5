"""The container: what is sound is read as the format's own package wrote it, and what is not says where and why."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.gguf.container import BrokenFile, GGUFFile, Metadata, TextArray
from tests import seeds
from tests.mapped import resident

from .raw import ARRAY, BOOL, F32, F64, I8, I16, I32, I64, STRING, U8, U16, U32, U64, File, Tensor, array, entry, text

NUMBERS = {"u8": (U8, 200), "i8": (I8, -100), "u16": (U16, 60_000), "i16": (I16, -30_000), "u32": (U32, 4_000_000_000),
           "i32": (I32, -2_000_000_000), "f32": (F32, 0.5), "u64": (U64, 1 << 63), "i64": (I64, -1 << 62),
           "f64": (F64, 1e300)}  # fmt: skip


def read(path: Path, raw: bytes | File) -> GGUFFile:
    path = path / "model.gguf"
    path.write_bytes(raw.raw() if isinstance(raw, File) else raw)
    return GGUFFile(path)


def broken(path: Path, raw: bytes | File, *words: str, error: type[UserError] = BrokenFile) -> None:
    with pytest.raises(error) as raised:
        read(path, raw)
    assert type(raised.value) is error
    for word in (str(path), *words):
        assert word in str(raised.value), str(raised.value)


# ---- sound files
def test_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {"a.int": 7, "a.negative": -7, "a.float": 0.25, "a.flag": True, "a.text": "größer 你"}
    for key, value in values.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    lists: dict[str, list[Any]] = {"b.ints": [1, -2, 3], "b.floats": [0.5, 1.5], "b.flags": [True, False, True]}
    for key, each in lists.items():
        writer.add_array(key, each)
    writer.add_array("b.texts", ["", "x", "é"])
    shapes = {"one": (5,), "two": (3, 64), "three": (2, 3, 32)}
    tensors = {
        name: np.random.default_rng(0).standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.add_tensor("eight", gguf.quants.quantize(tensors["two"], gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert {key: file.metadata[key] for key in values} == values
    assert {key: file.metadata[key].tolist() for key in lists} == lists
    assert list(file.metadata["b.texts"]) == [b"", b"x", "é".encode()]
    assert set(file.tensors) == {*tensors, "eight"}
    for name, tensor in tensors.items():
        info = file.tensors[name]
        assert info.shape == tensor.shape and info.type.name == "F32"
        assert np.array_equal(info.type.expand(file.data(info)).reshape(tensor.shape), tensor)
    eight = file.tensors["eight"]
    assert eight.shape == (3, 64) and file.data(eight).shape == (3, 2 * 34)


def test_every_kind_of_number(tmp_path: Path) -> None:
    entries = [entry(name, kind, value) for name, (kind, value) in NUMBERS.items()]
    entries += [entry("yes", BOOL, 1), entry("no", BOOL, 0), entry("none", ARRAY, array(F32, 0, b""))]
    metadata = read(tmp_path, File(entries)).metadata
    assert metadata.pop("none").size == 0
    assert metadata == {"yes": True, "no": False, **{name: value for name, (_, value) in NUMBERS.items()}}
    assert all(type(metadata[name]) is type(value) for name, (_, value) in NUMBERS.items())


def test_version_2(tmp_path: Path) -> None:
    assert read(tmp_path, File([entry("a", U32, 1)], version=struct.pack("<I", 2))).metadata == {"a": 1}


@pytest.mark.parametrize("align", [8, 32, 4096])
def test_alignment(align: int, tmp_path: Path) -> None:
    first, second = np.arange(3, dtype=np.float32), np.arange(4, dtype=np.float32)
    data = first.tobytes()
    data += b"\xff" * (-len(data) % align)
    tensors = [Tensor("first", (3,)), Tensor("second", (2, 2), offset=len(data))]
    entries = [entry("general.alignment", U32, align)]
    file = read(tmp_path, File(entries, tensors, data + second.tobytes(), align=align))
    assert np.array_equal(file.data(file.tensors["second"]).view(np.float32), second.reshape(2, 2))
    assert np.array_equal(file.data(file.tensors["first"]).view(np.float32), first[None])


def test_tensors_in_any_order(tmp_path: Path) -> None:
    tensors = [Tensor("second", offset=32), Tensor("first", offset=0)]
    file = read(tmp_path, File(tensors=tensors, data=bytes(48)))
    assert file.tensors["first"].start + 32 == file.tensors["second"].start


# ---- files that are not sound
def test_nothing(tmp_path: Path) -> None:
    broken(tmp_path, b"", "is empty")
    with pytest.raises(UserError, match=r"absent.gguf cannot be read \(No such file"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("raw", [b"GGU", b"GGUF", b"GGUF" + bytes(19), b"GGML" + bytes(60), b"\x80\x02}q\x00" * 9])
def test_another_format(raw: bytes, tmp_path: Path) -> None:
    broken(tmp_path, raw, "does not begin with GGUF", "Pass a .gguf file")


def test_versions(tmp_path: Path) -> None:
    words = ("only 2 and 3", "Convert it with the tools it was made with")
    for number in (0, 1, 4, 1 << 30):
        broken(tmp_path, File(version=struct.pack("<I", number)), f"version {number}", *words, error=UserError)
    for number in (2, 3):
        broken(tmp_path, File(version=struct.pack(">I", number)), "big-endian", error=UserError)


@pytest.mark.parametrize("count", [1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_counts(count: int, tmp_path: Path) -> None:
    broken(tmp_path, File(counts=(count, 0)), f"it claims {count:,} tensors, more than 32 bytes can hold")
    broken(tmp_path, File(counts=(0, count)), f"it claims {count:,} entries of metadata, more than 32 bytes can hold")


def test_metadata(tmp_path: Path) -> None:
    twice = [entry("a.key", U32, 1), entry("a.key", U32, 1)]
    broken(tmp_path, File(twice), "the metadata has 'a.key' twice", "Download or export it again")
    broken(tmp_path, File([entry("a.key", 13, bytes(16))]), "a.key is of the unknown type 13")
    broken(tmp_path, File([entry("k" * 70_000, U32, 1)]), "a key of the metadata is 70,000 bytes long, and 65,535")
    broken(tmp_path, File([entry(b"a\xff", U32, 1)]), "a key of the metadata is not UTF-8", "byte 1")
    broken(tmp_path, File([entry("a.key", STRING, b"ab\xc3")]), "a.key is not UTF-8", "byte 2")
    long = text("a.key") + struct.pack("<IQ", STRING, 1 << 60)
    broken(tmp_path, File([long]), f"it ends within a.key ({1 << 60:,} bytes wanted at")


def test_arrays(tmp_path: Path) -> None:
    def held(kind: int, length: int, raw: bytes) -> File:
        return File([entry("a.list", ARRAY, array(kind, length, raw))])

    inner = array(U32, 1, bytes(4))
    broken(tmp_path, held(ARRAY, 1, inner), "a.list is an array of the type 9; only numbers and strings")
    broken(tmp_path, held(77, 1, bytes(64)), "a.list is an array of the type 77")
    broken(tmp_path, held(U32, 1 << 40, bytes(64)), "it ends within a.list")
    broken(tmp_path, held(U64, (1 << 64) - 1, bytes(64)), "it ends within a.list")
    broken(tmp_path, held(STRING, 1 << 40, text("x")), f"it claims {1 << 40:,} strings in a.list")
    broken(tmp_path, held(STRING, 2, text("x") + struct.pack("<Q", 1 << 30)), "it ends within a.list")


def test_texts_that_are_not_utf8_are_only_read_when_asked_for(tmp_path: Path) -> None:
    """Vocabularies of old have such pieces."""
    file = read(tmp_path, File([entry("a.list", ARRAY, array(STRING, 2, text(b"a\xffb") + text("é")))]))
    assert Metadata(file.metadata, file.path).texts("a.list") == ["a\ufffdb", "é"]


@pytest.mark.parametrize("align", [0, 1, 4, 12, 33, 1 << 21, 1 << 31])
def test_odd_alignments(align: int, tmp_path: Path) -> None:
    words = f"general.alignment is {align}; it must be a power of two from 8 on"
    broken(tmp_path, File([entry("general.alignment", U32, align)]), words)


def test_an_alignment_that_is_no_number(tmp_path: Path) -> None:
    broken(tmp_path, File([entry("general.alignment", STRING, "32")]), "general.alignment is '32'")
    broken(tmp_path, File([entry("general.alignment", F32, 32.0)]), "general.alignment is 32.0")


def test_tensors(tmp_path: Path) -> None:
    def held(*tensors: Tensor, data: bytes = bytes(64)) -> File:
        return File(tensors=tensors, data=data)

    broken(tmp_path, held(Tensor("a"), Tensor("a", offset=32)), "it has the tensor a twice")
    broken(tmp_path, held(Tensor("a", offset=16)), "the tensor a begins at 16, not at a multiple of 32")
    broken(tmp_path, held(Tensor("a", (9,)), Tensor("b", offset=32)), "the tensors a and b overlap")
    broken(tmp_path, held(Tensor("a"), Tensor("b")), "the tensors a and b overlap")
    broken(tmp_path, held(Tensor("a", (17,))), "a of 68 bytes at 64 goes past its end, 128", "download is incomplete")
    broken(tmp_path, held(Tensor("a", offset=1 << 62)), "goes past its end")
    broken(tmp_path, held(Tensor("a", (), dimensions=0)), "a has 0 dimensions; 1 to 4 can be")
    broken(tmp_path, held(Tensor("a", (1,) * 5)), "a has 5 dimensions")
    broken(tmp_path, held(Tensor("a", (1, 1), dimensions=1 << 31)), f"a has {1 << 31} dimensions")
    broken(tmp_path, held(Tensor("a", (4, 0))), "a has the shape [0, 4]")
    broken(tmp_path, held(Tensor("a", ((1 << 64) - 1,))), f"a has the shape [{(1 << 64) - 1}]")
    broken(tmp_path, held(Tensor("a", (256, 256, 256))), "goes past its end")
    broken(tmp_path, held(Tensor("a", (33,), kind=8)), "a has rows of 33 values, and Q8_0 comes in 32")
    broken(tmp_path, held(Tensor("a", (32, 8), kind=12)), "a has rows of 32 values, and Q4_K comes in 256")
    broken(tmp_path, held(Tensor("t" * 70_000)), "the name of a tensor is 70,000 bytes long")
    broken(tmp_path, held(Tensor(b"\xfe")), "the name of a tensor is not UTF-8")


@pytest.mark.parametrize("kind", [4, 5, 9, 10, 23, 24, 31, 39, 1 << 31])
def test_types_that_cannot_be_read(kind: int, tmp_path: Path) -> None:
    file = File(tensors=[Tensor("a.weight", (256,), kind=kind)], data=bytes(1024))
    words = (f"the tensor a.weight is of the type {kind}, which cannot be read", "BF16, F16, F32, Q4_0, Q4_1, Q4_K, ")
    broken(tmp_path, file, *words, error=UserError)


WHOLE = File(
    [entry("general.alignment", U32, 32), entry("a.list", ARRAY, array(STRING, 2, text("x") + text("yy"))),
     entry("a.numbers", ARRAY, array(F32, 3, bytes(12))), entry("a.text", STRING, "some text")],
    [Tensor("first", (3, 2)), Tensor("second", (32,), kind=8, offset=32)], bytes(66))  # fmt: skip


def test_cut_anywhere(tmp_path: Path) -> None:
    raw = WHOLE.raw()
    assert set(read(tmp_path, raw).tensors) == {"first", "second"}
    for end in range(seeds.turn() % 3, len(raw), 3):  # another third every day
        with pytest.raises(BrokenFile) as raised:
            read(tmp_path, raw[:end])
        words = "is empty|does not begin with GGUF|it ends within|it claims|goes past its end"
        assert re.search(words, str(raised.value)), (end, str(raised.value))


# ---- lookups
META = Metadata({"n": 3, "zero": 0, "flag": True, "text": "x", "real": 0.5, "list": np.array([2, 2]),
                 "texts": TextArray.of("a"), "mixed": np.array([2, 3]), "reals": np.array([0.5]),
                 "inf": float("inf"), "nan": float("nan"),
                 "huge": 1 << 60, "empty": np.array([], dtype=np.int32)}, Path("m.gguf"))  # fmt: skip


def test_lookups() -> None:
    assert (META.whole("n"), META.whole("list"), META.whole("absent", 5)) == (3, 2, 5)
    assert (META.number("n"), META.number("real"), META.number("absent", 1.5)) == (3.0, 0.5, 1.5)
    assert (META.index("n", 4), META.index("zero", 1), META.index("absent", 1)) == (3, 0, None)
    assert META.array("list", whole=True) == [2, 2] and META.array("reals") == [0.5] and META.array("absent") == []
    assert META.text("text") == "x" and META.text("absent", "y") == "y" and META.texts("texts") == ["a"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: META.whole("zero"), "m.gguf: the metadata's zero must be a whole number from 1 to 2,147,483,647, got"),
        *((lambda key=key: META.whole(key), f"{key} must be a whole number")
          for key in ("flag", "text", "real", "mixed", "reals", "huge", "empty", "texts")),
        (lambda: META.whole("n", most=2), "from 1 to 2, got 3"),
        (lambda: META.whole("nn"), "has no nn, which must be a whole number from 1 to 2,147,483,647. Export it again"),
        *((lambda key=key: META.number(key), f"{key} must be a number")
          for key in ("flag", "text", "inf", "nan", "list")),
        (lambda: META.number("zero", above=0.0), "zero must be a number above 0, got 0"),
        *((lambda key=key: META.index(key, 3), f"{key} must be a number from 0 to 2") for key in ("n", "flag", "list")),
        *((lambda key=key: META.array(key), f"{key} must be a list of numbers") for key in ("n", "texts", "text")),
        (lambda: META.array("reals", whole=True), "reals must be a list of whole numbers"),
        *((lambda key=key: META.text(key), f"{key} must be a text") for key in ("n", "texts")),
        *((lambda key=key: META.texts(key), f"{key} must be a list of texts") for key in ("text", "list")),
        (lambda: META.texts("absent"), "the metadata has no absent, which must be a list of texts"),
    ],
)  # fmt: skip
def test_lookups_that_fail(call: Any, words: str) -> None:
    with pytest.raises(UserError) as raised:
        call()
    assert words in str(raised.value)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=8), st.sampled_from(sorted(NUMBERS))), unique_by=lambda e: e[0]))
def test_any_metadata(tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str]]) -> None:
    raw = File([entry(key, *NUMBERS[name]) for key, name in entries])
    kept = {key: NUMBERS[name][1] for key, name in entries}
    if "general.alignment" not in kept:
        assert read(tmp_path_factory.mktemp("any"), raw).metadata == kept


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_what_lies_around_goes_with_it(tmp_path: Path) -> None:
    """Reading a page maps its neighbours too, also those that were given back before."""
    path, rows = tmp_path / "large.gguf", 1 << 11
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("large", np.ones((rows, 1 << 10), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    data = file.data(file.tensors["large"])
    for row in reversed(range(rows)):
        start = file.tensors["large"].start + row * data.shape[1]
        assert data[row].any()
        file.let_go(start, start + data.shape[1])
    assert resident(data.ctypes.data) < data.nbytes // 100
