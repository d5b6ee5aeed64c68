"""`mlxrt info` of a checkpoint: format, profile, widths by class and every contradiction, from headers alone."""

import json

import pytest

from mlxrt.cli import main

from .makers import MAKERS

FORMATS = {
    "mixed": (
        "JANG 2",
        "attention",
        {"affine 4 bit group 32": 4, "affine 5 bit group 32": 2, "affine 8 bit group 64": 2},
    ),
    "rotated_dense": ("JANG 2", "attention", {"affine 6 bit group 32 rotated": 8, "F16": 8}),
    "jangtq": ("JANGTQ", "mlp", {"jangtq 2 bit": 4, "jangtq 4 bit": 2, "F16": 4}),
    "jangtq_singly": ("JANGTQ", "mlp", {"jangtq 2 bit": 16, "jangtq 4 bit": 8, "F16": 4}),
    "jangtq2": ("JANGTQ 2", "mlp", {"jangtq2 2 bit": 4, "jangtq2 3 bit": 2, "F16": 2}),
    "codebook_files": ("codebook VQ", "mlp", {"codebook of 40 x 8": 4, "codebook of 40 x 4": 2, "F16": 2}),
    "streams": ("JANG 1", "mlp", {"JANG 1 stream": 6}),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_format_and_widths(kind, tmp_path, capsys):
    folder = MAKERS[kind](seed=1).write(tmp_path)
    assert main(["info", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["model"]
    name, part, kinds = FORMATS[kind]
    assert report["format"]["name"] == name
    assert report["bits"][part]["kinds"] == kinds
    assert main(["info", str(folder)]) == 0
    assert f"format             {name}" in capsys.readouterr().out


def test_contradictions(tmp_path, capsys):
    folder = MAKERS["wrong_config"](seed=1).write(tmp_path / "a")
    assert main(["info", str(folder), "--json"]) == 0
    [line] = json.loads(capsys.readouterr().out)["model"]["contradictions"]
    assert "8 modules" in line
    folder = MAKERS["jangtq_singly"](seed=1).write(tmp_path / "b")
    assert main(["info", str(folder)]) == 0
    assert "the labels say bf16, 6 modules are JANGTQ" in capsys.readouterr().out
