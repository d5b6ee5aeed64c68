"""A kernel whose source is a string, where a file of kernels/metal is expected."""

from dataclasses import dataclass
from functools import cached_property

from mlxrt.kernels import KernelSource


@dataclass(frozen=True)
class InlineSource(KernelSource):
    """`file` is the kernel's name."""

    text: str = ""

    @cached_property
    def name(self) -> str:
        return self.file

    @property
    def body(self) -> str:
        return self.text

    @property
    def helpers(self) -> str:
        return ""
