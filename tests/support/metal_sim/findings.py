"""What a run found in a kernel, and which of it is an error. Knows no kernel."""

from dataclasses import dataclass

# Harmless on any device: said, not raised.
NOTES = frozenset({"float-cast"})
# Not wrong in Metal, but nothing our own kernels may do. CUDA, where the same text has to run, does not define shifts
# beyond the width, simd ops without all lanes, or grids that are no whole number of threadgroups; and several threads
# that write one element, be it the same value, mean that somebody computes what he need not.
TOLERATED = frozenset({"shift", "partial-simd", "ragged-grid", "benign-race"})


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str
    line: str = ""  # kernel.metal:12
    count: int = 1

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"[{self.kind}] {self.text}{at}" + (f" (x{self.count})" if self.count > 1 else "")


class MetalCompileError(RuntimeError):
    """The text does not compile; the compiler's own words."""

    def first(self) -> str:
        return next((line for line in str(self).splitlines() if "error" in line), str(self)[:200])


class MetalSimError(RuntimeError):
    def __init__(self, kernel: str, findings: list[Finding]):
        self.findings = findings
        super().__init__(f"{kernel}: " + "\n".join(map(str, findings)))


class NoCompiler(Exception):
    """This machine cannot run the simulator."""
