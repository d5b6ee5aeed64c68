"""`mlxrt convert ... DST.gguf`: the answer in a line or as JSON, and one line for whatever is wrong."""

import json

import pytest

from mlxrt.cli.convert import GGUF_TYPES
from mlxrt.weights.convert.gguf_types import FILE_TYPES


def give_words(folder) -> None:
    """A tokenizer whose pre-tokenizer llama.cpp has a name for."""
    data = json.loads((folder.path / "tokenizer.json").read_text())
    data["pre_tokenizer"]["use_regex"] = True
    (folder.path / "tokenizer.json").write_text(json.dumps(data))


def test_a_file_that_answers_as_its_source(cli, folder, tmp_path):
    give_words(folder)
    done = cli("convert", folder, tmp_path / "x.gguf", "--type", "F16", "--json")
    result = json.loads(done.out)
    assert done.code == 0 and result["file"] == str(tmp_path / "x.gguf") and result["same_choice"] == 1.0
    ask = ("-n", 8, "--temperature", 0, "--dtype", "float32", "hello")
    answers = [cli("generate", "-m", model, *ask).out for model in (folder, tmp_path / "x.gguf")]
    assert answers[0] == answers[1] != ""
    again = cli("convert", tmp_path / "x.gguf", tmp_path / "y.gguf", "--type", "q8_0", "--no-check")
    assert again.code == 0 and again.out.startswith(f"{tmp_path / 'y.gguf'}: ") and "bits per weight" in again.out


def test_types_are_listed():
    assert tuple(FILE_TYPES) == GGUF_TYPES


WRONG = [
    (("x.gguf",), "--type is missing: give one of f32, f16, bf16"),
    (("x.gguf", "--type", "q7"), "--type q7 is unknown; give one of"),
    (("x",), "--format is missing: one of mlx, jang, jangtq, codebook, gguf"),
    (("x", "--format", "gguf", "--type", "f16"), "must end in .gguf"),
    (("x", "--format", "mlx", "--type", "f16"), "--type applies to gguf, not to mlx"),
    (("tiny", "--format", "mlx"), "exists; give a new folder"),
    *[
        (("x.gguf", "--type", "f16", *flag), f"{flag[0]} does not apply to gguf")
        for flag in (
            ("--bits", 4), ("--group-size", 32), ("--profile", "JANG_4M"), ("--rules", "{}"), ("--hadamard",),
            ("--codes", 256), ("--length", 8), ("--shard-size", 1), ("--dtype", "bfloat16"),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("arguments, said", WRONG)
def test_wrong_calls(cli, folder, tmp_path, arguments, said):
    name, *flags = arguments
    assert said in cli("convert", folder, tmp_path / name, *flags).refused(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_a_tokenizer_without_a_name_is_refused_and_can_be_left_out(cli, folder, tmp_path):
    call = ("convert", folder, tmp_path / "x.gguf", "--type", "q8_0", "--no-check")
    assert "--no-tokenizer" in cli(*call).refused(1)
    assert cli(*call, "--no-tokenizer").code == 0
    assert "exists; give a new file" in cli(*call).refused(2)
