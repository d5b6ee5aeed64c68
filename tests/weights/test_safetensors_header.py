"""A damaged safetensors header is one line that names the file, and never reaches MLX."""

import json
import struct

import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.weights import FolderCheckpoint
from mlxrt.weights.formats.safetensors import BITS, read_header
from tests.support.tiny_files import write_folder

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
}


def write(path, header, data: bytes = bytes(28), length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_good_header(tmp_path):
    infos = read_header(write(tmp_path / "x", GOOD | {"__metadata__": {"format": "pt"}}))
    assert {n: (i.shape, i.dtype, i.nbytes) for n, i in infos.items()} == {
        "a": ((2, 3), "F32", 24),
        "b": ((4,), "U8", 4),
    }


def test_agrees_with_the_safetensors_package(tmp_path):
    from safetensors.numpy import save_file

    arrays = {
        "s": np.float32(3),
        "e": np.zeros((0, 5), np.float16),
        "m": np.ones((3, 5), np.int64),
        "b": np.ones(7, bool),
    }
    save_file({k: np.asarray(v) for k, v in arrays.items()}, tmp_path / "x")
    infos = read_header(tmp_path / "x")
    assert {n: (i.shape, i.nbytes) for n, i in infos.items()} == {n: (np.shape(v), v.nbytes) for n, v in arrays.items()}


def test_knows_every_dtype_of_the_format():
    """The package's own error lists what it accepts."""
    from safetensors import SafetensorError, deserialize

    header = json.dumps({"a": {"dtype": "NOPE", "shape": [1], "data_offsets": [0, 1]}}).encode()
    with pytest.raises(SafetensorError) as raised:
        deserialize(struct.pack("<Q", len(header)) + header + b"x")
    listed = [word.strip("`") for word in str(raised.value).replace(",", " ").split() if word.startswith("`")]
    listed = {word for word in listed if word.isupper() or word[:1] in "FUIBC"} - {"NOPE"}
    assert listed and listed <= BITS.keys()


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def changed(**change) -> dict:
    return GOOD | {"a": {k: v for k, v in (GOOD["a"] | change).items() if v is not ...}}


@pytest.mark.parametrize(
    "header, problem",
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b"[]", "invalid type: sequence"),
        (b"\xff\xff", "invalid UTF-8"),
        (b"null", "invalid type: null"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"a":' * 100_000, "recursion limit"),
        (b"1" * 5000, "invalid JSON"),
        (b'{"a": 1, "a": 2}', "invalid type: integer"),
        ({"a": 5}, "expected struct TensorInfo"),
        ({"a": None}, "expected struct TensorInfo"),
        ({"__metadata__": 5}, "expected a map"),
        ({"__metadata__": {"a": 1}}, "expected a string"),
        (changed(dtype="F33"), "unknown variant `F33`"),
        (changed(dtype=4), "invalid type: integer `4`"),
        (changed(dtype=...), "missing field `dtype`"),
        (changed(shape=nested(900)), "recursion limit"),
        (changed(shape=nested(60)), "expected usize"),
        (changed(shape=...), "missing field `shape`"),
        (changed(shape=[-2, -3]), "integer `-2`, expected usize"),
        (changed(shape=[2.0, 3]), "floating point `2.0`, expected usize"),
        (changed(shape=[True, 6]), "boolean `true`, expected usize"),
        (changed(shape="2"), "expected a sequence"),
        (changed(shape=[2**40, 0]), "invalid shape"),
        (changed(shape=[2, 4]), "invalid shape, data type, or offset"),
        (changed(shape=[2**31 - 1] * 9), "overflow computing buffer size"),
        (changed(data_offsets=...), "missing field `data_offsets`"),
        (changed(data_offsets=[24, 0]), "invalid offset for tensor `a`"),
        (changed(data_offsets=[0]), "invalid length 1"),
        (changed(data_offsets=[-24, 0]), "integer `-24`, expected usize"),
        (changed(data_offsets=[0, 10**30]), "expected usize"),
        (changed(data_offsets=[4, 28]), "invalid offset for tensor `a`"),
        (changed(data_offsets=[28, 52]), "invalid offset for tensor `b`"),
        ({"a": GOOD["a"]}, "file not fully covered"),
    ],
)
def test_damaged(tmp_path, header, problem):
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(BadCheckpoint, match=problem) as raised:
        read_header(path)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "header, problem",
    [
        (b'{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "a": %s}', "not fully covered"),
        (b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]}, "a": %s}', "invalid offset for tensor `a`"),
    ],
)
def test_a_name_twice_leaves_a_gap(tmp_path, header, problem):
    """The last of two entries counts, for the library and for MLX: the bytes of the other belong to no tensor."""
    last = b'{"dtype": "U8", "shape": [4], "data_offsets": [%d, %d]}' % ((0, 4) if b"F32" in header else (20, 24))
    with pytest.raises(BadCheckpoint, match=problem):
        read_header(write(tmp_path / "x", header % last))


def test_dimensions_beyond_those_of_mlx(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}}
    with pytest.raises(BadCheckpoint, match="MLX has dimensions up to 2147483647"):
        read_header(write(tmp_path / "x", header, b""))


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1, 100_000_001])
def test_header_longer_than_the_file(tmp_path, length):
    with pytest.raises(BadCheckpoint, match=r"header too large|invalid header length"):
        read_header(write(tmp_path / "x", GOOD, length=length))


@pytest.mark.parametrize("keep", [0, 3, 7, 8, 50])
def test_truncated(tmp_path, keep):
    path = write(tmp_path / "x", GOOD)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadCheckpoint, match="damaged safetensors file"):
        read_header(path)


def test_truncated_data(tmp_path):
    with pytest.raises(BadCheckpoint, match="file not fully covered"):
        read_header(write(tmp_path / "x", GOOD, bytes(20)))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F64", "F8_E8M0"])
def test_dtypes_no_model_of_ours_has(tmp_path, dtype):
    write_folder(tmp_path, {})
    size = BITS[dtype] // 8
    write(
        tmp_path / "model.safetensors",
        {"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}},
        bytes(2 * size),
    )
    with pytest.raises(UnsupportedModel, match=f"w is stored as {dtype}"):
        FolderCheckpoint(tmp_path).load()
