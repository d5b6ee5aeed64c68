"""The op in docs/add-a-kernel.md works as it is printed there."""

from pathlib import Path

from mlxrt.kernels import OPS, make_gpu, metal_source
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.registry import OPS as REGISTRY
from mlxrt.kernels.selftest import check_case, compute_reference, list_cases

from ..support.kernels.mutants import mutants, pieces
from ..support.metal_sim import ASCENDING, DESCENDING, Simulator
from ..support.metal_sim.lint import lint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-kernel.md"


def printed() -> tuple[str, str]:
    """The lines the diff adds to its two new files: Metal and Python."""
    diff = PAGE.read_text(encoding="utf-8").split("```diff\n")[1].split("```")[0]
    files = diff.split("--- a/")[0].split("+++ b/")[1:]
    lines = [file.splitlines()[1:] for file in files]
    assert all(line.startswith("+") for one in lines for line in one)
    metal, python = ("\n".join(line[1:] for line in one) + "\n" for one in lines)
    return metal, python


def test_the_printed_op_is_an_op(monkeypatch):
    monkeypatch.setattr("mlxrt.kernels.registry.OPS", dict(REGISTRY))
    metal, python = printed()
    read = metal_source.read
    monkeypatch.setattr(metal_source, "read", lambda path: metal if path == "metal/scale_rows.metal" else read(path))
    space = {"__name__": "mlxrt.kernels.ops.scale_rows", "__package__": "mlxrt.kernels.ops"}
    exec(compile(python, str(PAGE), "exec"), space)
    op = space["scale_rows"]
    assert "scale_rows" not in OPS  # the registry of everybody else is untouched
    assert not lint(op.sources[0].helpers, op.sources[0].body)
    for dtype in DTYPES:
        for case in list_cases(op, dtype):
            for order in (ASCENDING, DESCENDING):
                sim = Simulator(order, portable=True)
                report = check_case(op, case, make_gpu("metal", sim.metal_kernel), compute_reference(op, case))
                assert report.within(op.tolerance[dtype]), f"{dtype} {case.name}: {report.message}"
    [piece] = pieces({"scale_rows": op})
    assert len(mutants(piece)) == 3
