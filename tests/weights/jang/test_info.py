"""`mlxrt info` of a bundle: format, profile, widths by class and every contradiction, from headers alone."""

import json

import pytest

from mlxrt.cli import main

from .makers import KINDS

FORMATS = {
    "mixed": (
        "JANG 2",
        "attention",
        {"affine 4 bit group 32": 4, "affine 5 bit group 32": 2, "affine 8 bit group 64": 2},
    ),
    "turned_dense": ("JANG 2", "attention", {"affine 6 bit group 32 turned": 8, "F16": 8}),
    "coded": ("JANGTQ", "mlp", {"jangtq 2 bit": 4, "jangtq 4 bit": 2, "F16": 4}),
    "coded_singly": ("JANGTQ", "mlp", {"jangtq 2 bit": 16, "jangtq 4 bit": 8, "F16": 4}),
    "second": ("JANGTQ 2", "mlp", {"jangtq2 2 bit": 4, "jangtq2 3 bit": 2, "F16": 2}),
    "vector_files": ("codebook VQ", "mlp", {"codebook of 40 x 8": 4, "codebook of 40 x 4": 2, "F16": 2}),
    "streams": ("JANG 1", "mlp", {"JANG 1 stream": 6}),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_format_and_widths(kind, tmp_path, capsys):
    folder = KINDS[kind](seed=1).write(tmp_path)
    assert main(["info", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["model"]
    name, part, kinds = FORMATS[kind]
    assert told["format"]["name"] == name
    assert told["bits"][part]["kinds"] == kinds
    assert main(["info", str(folder)]) == 0
    assert f"format             {name}" in capsys.readouterr().out


def test_contradictions(tmp_path, capsys):
    folder = KINDS["wrong_config"](seed=1).write(tmp_path / "a")
    assert main(["info", str(folder), "--json"]) == 0
    [line] = json.loads(capsys.readouterr().out)["model"]["contradictions"]
    assert "8 modules" in line
    folder = KINDS["coded_singly"](seed=1).write(tmp_path / "b")
    assert main(["info", str(folder)]) == 0
    assert "the labels say bf16, 6 modules are JANGTQ" in capsys.readouterr().out
