"""Quantise a model to 4 bits and compare it with the source: python examples/convert.py [MODEL [FOLDER]]

The same as `mlxrt convert MODEL FOLDER --format mlx --bits 4`, which also reports the KL divergence.
"""

import sys
import tempfile
from pathlib import Path

import mlx.core as mx

import mlxrt
from mlxrt.cli import main

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
TOKENS = list(range(1, 33))

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(temporary) / "quantised"
    if code := main(["convert", MODEL, str(folder), "--format", "mlx", "--bits", "4", "--group-size", "32"]):
        sys.exit(code)
    with mlxrt.load(MODEL) as source, mlxrt.load(str(folder)) as quantized:
        agree = mx.argmax(source.score(TOKENS), axis=-1) == mx.argmax(quantized.score(TOKENS), axis=-1)
        print(f"the likeliest token is the same at {agree.sum().item()} of {len(TOKENS)} positions")
