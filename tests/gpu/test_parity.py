"""Every family on this device against Hugging Face: whole, in chunks, cut back, forked, saved, in a batch; in float32.

The small fixtures of tests/parity; MLXRT_PARITY=DIR takes others of the same form, one test a variant.
"""

import os
from pathlib import Path

import pytest

from tests import parity_adapter
from tests.support.parity import HERE, RowCheck, list_rows

ROWS = list_rows(Path(os.environ.get("MLXRT_PARITY") or HERE))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_family_agrees_with_hugging_face(row, tmp_path, report):
    row.make_checkpoint(tmp_path)
    check = RowCheck(row, str(tmp_path))
    try:
        check.whole(parity_adapter.logits)
        check.steps(parity_adapter.Stepper(str(tmp_path)))
        check.batch(parity_adapter.batch)
    finally:
        parity_adapter.opened.cache_clear()
    report(f"parity {row}: {check.count} checks, {len(check.wrong)} wrong, largest difference {check.largest:.1e}")
    assert not check.wrong, "\n".join(check.wrong)


def test_there_is_a_row_of_every_family():
    families = {row.fixture.name for row in ROWS}
    assert {"gemma2", "gemma3_text", "gemma4_e2b", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_next"} <= families
