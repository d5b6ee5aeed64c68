"""Our GGUF directory against the gguf package's reader, and against damage."""

import struct

import gguf
import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from mlxrt.weights.formats.gguf.reader import GGML_TYPES, read_gguf
from tests.support.tiny_files import CONFIG, float_weights, write_gguf


def every_type(writer) -> None:
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{name}")(f"t.{name}", 100 if name[0] == "u" else -100)
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 1e300)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "Ünï\n")
    writer.add_array("t.strings", ["a", "", "日本"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [1.5, 2.5])
    writer.add_array("t.nested", [[1, 2], [3]])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf", float_weights(), extra=every_type)


def test_same_directory_as_the_gguf_package(good):
    ours, theirs = read_gguf(good), gguf.GGUFReader(good)
    assert {n: (r.shape, r.ggml_type, r.offset, r.nbytes) for n, r in ours.tensors.items()} == {
        t.name: (tuple(int(d) for d in reversed(t.shape)), t.tensor_type.name, int(t.data_offset), int(t.n_bytes))
        for t in theirs.tensors
    }
    for key, value in ours.metadata.items():
        if key != "t.nested":  # the package flattens it
            assert value == theirs.fields[key].contents(), key
    assert ours.metadata["t.nested"] == [[1, 2], [3]] and ours.metadata["t.bool"] is True


def test_kinds_are_the_gguf_packages():
    theirs = {int(k): (k.name, *gguf.GGML_QUANT_SIZES[k]) for k in gguf.GGMLQuantizationType}
    assert {k: v for k, v in GGML_TYPES.items() if k in theirs} == {k: v for k, v in theirs.items() if k in GGML_TYPES}
    assert len(GGML_TYPES.keys() & theirs.keys()) >= 30


def text(s: str) -> bytes:
    return struct.pack("<Q", len(s)) + s.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def record(name="w", dims=(32, 2), kind=0, offset=0, rank=None) -> bytes:
    numbers = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        text(name) + struct.pack("<I", len(dims) if rank is None else rank) + numbers + struct.pack("<IQ", kind, offset)
    )


def write(path, pairs=(), records=(), data=bytes(4096), version=3, counts=None, magic=b"GGUF"):
    tensors, keys = counts or (len(records), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(records)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQB", 0, 1, 7)


ALIGN = "general.alignment"


@pytest.mark.parametrize(
    "parts, problem",
    [
        ({"counts": (2**63, 0)}, "cannot fit"),
        ({"counts": (0, 2**64 - 1)}, "cannot fit"),
        ({"counts": (3, 0)}, "damaged"),
        ({"pairs": [pair("a", 13, b"")]}, "unknown value type 13"),
        ({"pairs": [pair("a", 8, struct.pack("<Q", 2**62))]}, "needs"),
        ({"pairs": [pair("a", 9, struct.pack("<IQ", 4, 2**62))]}, "needs"),
        ({"pairs": [pair("a", 9, struct.pack("<IQ", 8, 2**61))]}, "claims"),
        ({"pairs": [pair("a", 9, struct.pack("<IQ", 9, 2**61))]}, "claims"),
        ({"pairs": [pair("a", 9, struct.pack("<IQ", 99, 1))]}, "unknown value type 99"),
        ({"pairs": [pair("a", 9, nested(4))]}, "nests arrays"),
        ({"pairs": [pair("a", 9, nested(50_000))]}, "nests arrays"),
        ({"pairs": [pair("a", 0, b"\1"), pair("a", 0, b"\1")]}, "key a appears twice"),
        ({"pairs": [pair("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")]}, "not UTF-8"),
        ({"pairs": [pair(ALIGN, 4, struct.pack("<I", 0))]}, "alignment"),
        ({"pairs": [pair(ALIGN, 4, struct.pack("<I", 33))]}, "alignment"),
        ({"pairs": [pair(ALIGN, 4, struct.pack("<I", 2**31))]}, "alignment"),
        ({"pairs": [pair(ALIGN, 8, text("32"))]}, "alignment"),
        ({"records": [record(dims=())]}, "0 dimensions"),
        ({"records": [record(dims=(1,) * 5)]}, "5 dimensions"),
        ({"records": [record(rank=2**32 - 1)]}, "dimensions"),
        ({"records": [record(name="")]}, "named tensor"),
        ({"records": [record(dims=(0, 2))]}, "expected 1 to"),
        ({"records": [record(dims=(2**31, 2))]}, "expected 1 to"),
        ({"records": [record(dims=(2**31 - 1,) * 4)]}, "truncated"),
        ({"records": [record(dims=(33, 2), kind=8)]}, "block of 32"),
        ({"records": [record(offset=7)]}, "not a multiple of 32"),
        ({"records": [record(offset=2**63)]}, "truncated"),
        ({"records": [record(), record()]}, "tensor w appears twice"),
        ({"records": [record(), record("v")]}, "overlap"),
        ({"records": [record(dims=(1024, 2))]}, "truncated"),
    ],
)
def test_damaged(tmp_path, parts, problem):
    path = write(tmp_path / "x.gguf", **parts)
    with pytest.raises(BadCheckpoint, match=problem) as raised:
        read_gguf(path)
    assert str(path) in str(raised.value)


def test_alignment_is_honoured(tmp_path):
    path = write(tmp_path / "x.gguf", [pair(ALIGN, 4, struct.pack("<I", 256))], [record()])
    assert read_gguf(path).tensors["w"].offset == 256


@pytest.mark.parametrize(
    "parts, error, problem",
    [
        ({"magic": b"GGML"}, BadCheckpoint, "not a GGUF file"),
        ({"version": 1}, UnsupportedModel, "version 1"),
        ({"version": 4}, UnsupportedModel, "version 4"),
        ({"version": 3 << 24}, UnsupportedModel, "big-endian"),
        ({"records": [record(kind=4)]}, UnsupportedModel, "w has ggml type 4"),
        ({"records": [record(kind=2**32 - 1)]}, UnsupportedModel, "ggml type 4294967295"),
    ],
)
def test_other_files(tmp_path, parts, error, problem):
    with pytest.raises(error, match=problem):
        read_gguf(write(tmp_path / "x.gguf", **parts))


def test_missing_and_empty(tmp_path):
    with pytest.raises(ModelNotFound):
        read_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        read_gguf(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match="empty"):
        read_gguf(tmp_path / "x.gguf")


def test_truncated_anywhere(good, tmp_path):
    whole = good.read_bytes()
    data = min(r.offset for r in read_gguf(good).tensors.values())
    for keep in [*range(1, data, 37), data, len(whole) - 4097]:
        (tmp_path / "cut.gguf").write_bytes(whole[:keep])
        with pytest.raises(BadCheckpoint):
            read_gguf(tmp_path / "cut.gguf")


def test_tensor_bytes(good):
    parsed = read_gguf(good)
    found = parsed.tensor_bytes(parsed.tensors["output_norm.weight"]).view(np.float32)
    np.testing.assert_array_equal(found, float_weights(CONFIG)["model.norm.weight"])
