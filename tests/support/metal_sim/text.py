"""The text MLX hands to the Metal compiler for one call of a custom kernel, without its utils preamble.

Written from the rules MLX follows; a test compares it with MLX's own text. Compiles nothing.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}
POSITIONS = """dispatch_threads_per_threadgroup grid_origin grid_size thread_position_in_grid
    thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid threads_per_grid
    threads_per_threadgroup""".split()
INDICES = """dispatch_quadgroups_per_threadgroup dispatch_simdgroups_per_threadgroup quadgroup_index_in_threadgroup
    quadgroups_per_threadgroup simdgroup_index_in_threadgroup simdgroups_per_threadgroup thread_execution_width
    thread_index_in_quadgroup thread_index_in_simdgroup thread_index_in_threadgroup threads_per_simdgroup""".split()
ATTRIBUTES = {name: "uint3" if name in POSITIONS else "uint" for name in sorted(POSITIONS + INDICES)}
EXTRAS = {"_shape": "int*", "_strides": "int64_t*", "_ndim": "int&"}
CONSTANT_BELOW = 8  # an input of fewer elements lives in the constant address space

Template = Sequence[tuple[str, bool | int | mx.Dtype]]
Spelled = tuple[tuple[str, str, str], ...]  # name, kind and spelling of each template argument


class Form(NamedTuple):
    """What the text takes from an input: its dtype, whether it is a scalar, whether it is small."""

    dtype: mx.Dtype
    ndim: int
    size: int

    @classmethod
    def of(cls, x: mx.array) -> "Form":
        return cls(x.dtype, min(x.ndim, 1), min(x.size, CONSTANT_BELOW))


@dataclass(frozen=True)
class Argument:
    """One buffer. `role`: in, out, _shape, _strides or _ndim; `number`: which input or output it belongs to."""

    role: str
    name: str
    type: str  # with * or &, without address space
    number: int


@dataclass(frozen=True)
class KernelText:
    name: str
    instance: str  # "<float, 64>", empty without template arguments
    text: str
    arguments: tuple[Argument, ...]
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class Definition:
    """What `metal_kernel` is given."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    atomic_outputs: bool = False

    def text(self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template) -> KernelText:
        # True and 1 are equal and spelled differently.
        spelled = tuple((name, *spell(value)) for name, value in template)
        return make_text(self, tuple(map(Form.of, inputs)), tuple(output_dtypes), spelled)

    def make_text(self, inputs: Sequence[Form], output_dtypes: Sequence[mx.Dtype], template: Spelled) -> KernelText:
        instance = "<" + ", ".join(value for *_, value in template) + ">" if template else ""
        name = self.kernel_name(inputs, output_dtypes, instance)
        arguments = [*self.input_arguments(inputs), *self.output_arguments(output_dtypes)]
        attributes = tuple(a for a in ATTRIBUTES if a in self.source)
        text = self.header
        if template:
            text += "template <" + ", ".join(f"{kind} {n}" for n, kind, _ in template) + ">\n"
        text += f"[[kernel]] void {name}(\n" + self.signature(arguments, attributes, inputs) + self.source + "\n}\n"
        if template:
            text += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({name}{instance}) {name}{instance};\n'
        return KernelText(name, instance, text, tuple(arguments), attributes)

    def kernel_name(self, inputs: Sequence[Form], output_dtypes: Sequence[mx.Dtype], instance: str) -> str:
        name = "custom_kernel_" + self.name
        if instance:
            name += "_" + re.sub(r"[<>-]|, ", "_", instance)[:-1]
        for x in inputs:
            name += "_" + TYPES[x.dtype] + ("s" if x.ndim == 0 else "c" if x.size < CONSTANT_BELOW else "")
        return name + "".join("_" + TYPES[dtype] for dtype in output_dtypes)

    def input_arguments(self, inputs: Sequence[Form]) -> list[Argument]:
        found = []
        for i, (name, x) in enumerate(zip(self.input_names, inputs, strict=True)):
            found.append(Argument("in", name, TYPES[x.dtype] + ("&" if x.ndim == 0 else "*"), i))
            wanted = [suffix for suffix in EXTRAS if x.ndim > 0 and name + suffix in self.source]
            found += [Argument(suffix, name + suffix, EXTRAS[suffix], i) for suffix in wanted]
        return found

    def output_arguments(self, dtypes: Sequence[mx.Dtype]) -> list[Argument]:
        kinds = [f"atomic<{TYPES[d]}>" if self.atomic_outputs else TYPES[d] for d in dtypes]
        return [
            Argument("out", name, kind + "*", i)
            for i, (name, kind) in enumerate(zip(self.output_names, kinds, strict=True))
        ]

    def signature(self, arguments: list[Argument], attributes: tuple[str, ...], inputs: Sequence[Form]) -> str:
        text = ""
        for i, a in enumerate(arguments):
            if a.role == "out":
                text += f"  device {a.type} {a.name} [[buffer({i})]]"
                # MLX counts inputs and outputs only, so _shape and its like move the place where it ends the list.
                more = i < len(inputs) + len(self.output_names) - 1 or attributes
                text += ",\n" if more else ") {\n"
                continue
            space = "device" if a.role == "in" and inputs[a.number].size >= CONSTANT_BELOW else "constant"
            text += f"  const {space} {a.type} {a.name} [[buffer({i})]],\n"
        text += ",\n".join(f"  {ATTRIBUTES[a]} {a} [[{a}]]" for a in attributes)
        return text + (") {\n" if attributes else "")


@functools.cache
def make_text(
    definition: Definition, inputs: tuple[Form, ...], output_dtypes: tuple[mx.Dtype, ...], template: Spelled
) -> KernelText:
    """Made once: an answer launches the same kernels over and over."""
    return definition.make_text(inputs, output_dtypes, template)


def spell(value: bool | int | mx.Dtype) -> tuple[str, str]:
    """Kind and spelling of a template argument."""
    if isinstance(value, bool):
        return "bool", str(int(value))
    if isinstance(value, int):
        return "int", str(value)
    return "typename", TYPES[value]
