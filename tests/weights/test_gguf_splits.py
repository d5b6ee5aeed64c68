"""Models in several GGUF files: read as one, whichever is given; sets that do not fit together are refused."""

import re

import gguf
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadCheckpoint, MlxrtError, ModelNotFound
from mlxrt.weights import GgufCheckpoint, build
from mlxrt.weights.source.hub import Repository, is_complete
from mlxrt.weights.source.resolve import resolve
from tests.support.tiny_files import float_weights, write_gguf


@pytest.fixture
def parts(tmp_path):
    """A model in three files, written by the gguf package's own splitting."""
    whole = write_gguf(tmp_path / "whole.gguf", float_weights())
    folder = tmp_path / "parts"
    folder.mkdir()
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama", split_max_tensors=8)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(folder.iterdir())
    assert [p.name for p in found] == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def test_a_set_is_one_model(parts, tmp_path):
    expected = dict(tree_flatten(build(GgufCheckpoint(tmp_path / "whole.gguf")).parameters()))
    checkpoint = GgufCheckpoint(parts[0])
    assert checkpoint.files() == parts
    found = dict(tree_flatten(build(checkpoint).parameters()))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and mx.array_equal(found[name], array)


def test_a_folder_with_a_set(parts):
    assert resolve(str(parts[0].parent)).path == parts[0]
    parts[1].unlink()
    with pytest.raises(ModelNotFound, match="several GGUF files"):
        resolve(str(parts[0].parent))


def test_what_does_not_fit_together(parts, tmp_path):
    kept = [p.read_bytes() for p in parts]

    def refused(message, change):
        for path, blob in zip(parts, kept):
            path.write_bytes(blob)
        change()
        with pytest.raises(MlxrtError, match=message):
            GgufCheckpoint(parts[0])

    refused("x-00003-of-00003.gguf is not beside it", parts[2].unlink)
    refused("not split 1 of 3", lambda: parts[1].write_bytes(kept[2]))
    refused("not split 0 of 3", lambda: parts[0].write_bytes(kept[1]))
    refused("truncated", lambda: parts[2].write_bytes(kept[2][:-100]))
    other = re.sub(rb"(split\.tensors\.count.{4}).", lambda found: found[1] + b"c", kept[0], flags=re.DOTALL)
    refused("says .* tensors in all", lambda: parts[0].write_bytes(other))
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(kept[0])
    with pytest.raises(BadCheckpoint, match=r"its name must end in -00001-of-00003.gguf"):
        GgufCheckpoint(renamed)


def test_the_hub_gives_all_files_of_a_set(tmp_path):
    repo = Repository.parse("owner/name:x-00001-of-00002.gguf")
    assert repo.allow_patterns == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    (tmp_path / "x-00001-of-00002.gguf").touch()
    assert not is_complete(tmp_path, repo.file)
    (tmp_path / "x-00002-of-00002.gguf").touch()
    assert is_complete(tmp_path, repo.file)
    assert Repository.parse("owner/name:y.gguf").allow_patterns == ["y.gguf"]
