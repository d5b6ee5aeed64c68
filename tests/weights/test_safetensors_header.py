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


def entry(**change) -> dict:
    return GOOD | {"a": {k: v for k, v in (GOOD["a"] | change).items() if v is not ...}}


@pytest.mark.parametrize(
    "header, problem",
    [
        (b"", "not usable JSON"),
        (b"{", "not usable JSON"),
        (b"[]", "a list, expected an object"),
        (b"\xff\xff", "not usable JSON"),
        (b"null", "NoneType"),
        (b"[" * 100_000, "not usable JSON"),
        (b'{"a":' * 100_000, "not usable JSON"),
        (b"1" * 5000, "not usable JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        ({"a": 5}, "described by a int"),
        ({"a": None}, "described by"),
        ({"__metadata__": 5}, "__metadata__"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        (entry(dtype="F33"), "unknown dtype F33"),
        (entry(dtype=4), "unknown dtype"),
        (entry(dtype=...), "unknown dtype"),
        (entry(shape=nested(900)), "nested deeper"),
        (entry(shape=nested(60)), "the shape"),
        (entry(shape=...), "shape"),
        (entry(shape=[-2, -3]), "shape"),
        (entry(shape=[2.0, 3]), "shape"),
        (entry(shape=[True, 6]), "shape"),
        (entry(shape="2"), "shape"),
        (entry(shape=[2**40, 0]), "shape"),
        (entry(shape=[2, 4]), "32 bytes, but its data_offsets span 24"),
        (entry(shape=[2**31 - 1] * 9), "bytes, but"),
        (entry(data_offsets=...), "data_offsets"),
        (entry(data_offsets=[24, 0]), "data_offsets"),
        (entry(data_offsets=[0]), "data_offsets"),
        (entry(data_offsets=[-24, 0]), "data_offsets"),
        (entry(data_offsets=[0, 10**30]), "data_offsets"),
        (entry(data_offsets=[4, 28]), "begins at"),
        (entry(data_offsets=[28, 52]), "begins at"),
        ({"a": GOOD["a"]}, "take 24 bytes, the file holds 28"),
    ],
)
def test_damaged(tmp_path, header, problem):
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(BadCheckpoint, match=problem) as raised:
        read_header(path)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1, 100_000_001])
def test_header_longer_than_the_file(tmp_path, length):
    with pytest.raises(BadCheckpoint, match=f"a header of {length} bytes"):
        read_header(write(tmp_path / "x", GOOD, length=length))


@pytest.mark.parametrize("keep", [0, 3, 7, 8, 50])
def test_truncated(tmp_path, keep):
    path = write(tmp_path / "x", GOOD)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadCheckpoint, match="damaged safetensors file"):
        read_header(path)


def test_truncated_data(tmp_path):
    with pytest.raises(BadCheckpoint, match="take 28 bytes, the file holds 20"):
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
