"""bench.gpu.decode: rates from the times of a batch, and engines of two checkouts beside one another."""

import json
import sys
from pathlib import Path

import pytest

from bench.gpu import decode
from mlxrt.weights.random_models import published_configs

ROOT = Path(__file__).resolve().parents[2]


def test_rates_count_from_the_last_first_token():
    reply = {"rows": [{"at": [1.0, 2.0, 3.0, 4.0]}, {"at": [2.0, 3.0, 4.0]}]}
    assert decode.decode_rate(reply) == pytest.approx(2.0)
    assert decode.prefill_rate(reply, 100) == 50


@pytest.mark.slow
def test_two_checkouts_and_mlx_lm(monkeypatch, tmp_path, capsys):
    out = tmp_path / "a.json"
    command = ["decode", "smollm2-135m", "--runs", "1x8,2x8", "--tokens", "3", "--rounds", "2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--before", str(ROOT)])
    assert "smollm2-135m" in published_configs()
    decode.main()
    rows = json.loads(out.read_text())
    assert [(row["batch"], row["engine"]) for row in rows] == [
        (batch, name) for batch in (1, 2) for name in ("mlxrt", "before", "mlx-lm")
    ]
    assert all(row["decode"] > 0 and row["prefill"] > 0 for row in rows)
    assert [row["difference"] for row in rows if row["engine"] == "before"] == ["3 tokens equal"] * 2
