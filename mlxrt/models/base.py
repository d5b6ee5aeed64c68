"""Base classes of models: what the engine calls. A model knows nothing of batches, schedulers or masks."""

from collections.abc import Iterable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..cache.memory import LayerSpec, Shared
from ..kernels import PLAIN, Kernels
from .config import ModelConfig


def find_arrays(modules: Iterable[nn.Module | None]) -> list[tuple[nn.Module, str]]:
    """(module, name) of every array that is a direct attribute of one of them."""
    return [(m, name) for m in modules if m is not None for name, a in m.items() if isinstance(a, mx.array)]


class KernelModule(nn.Module):
    """A module that runs ops through `Kernels`: our kernel where there is one, else plain MLX."""

    kernels: Kernels = PLAIN

    def pack_constants(self, *modules: nn.Module | None) -> None:
        """Pack the arrays of these modules into one buffer, so that a kernel that reads them all has one input."""
        if self.kernels.gpu is None:
            return
        found = find_arrays(modules)
        for (module, name), array in zip(found, self.kernels.gpu.pack_constants([m[name] for m, name in found])):
            module[name] = array


class FusedModule(KernelModule):
    """A module that merges weights after loading, e.g. q, k and v into one matrix. Inner modules are fused first."""

    def fuse(self) -> None:
        raise NotImplementedError

    def pack_norms(self, *norms: nn.Module, into: nn.Module) -> None:
        """Pack norm weights with the `input_linear` of the module they feed and with the constants of its `layout`, so
        that the kernel which fuses them has one input."""
        if self.kernels.gpu is None:
            return
        layout = getattr(into, "layout", None)
        more = {} if layout is None else layout.arrays()
        found = find_arrays((*norms, getattr(into, "input_linear", None)))
        packed = self.kernels.gpu.pack_constants([*(m[name] for m, name in found), *more.values()])
        for (module, name), array in zip(found, packed):
            module[name] = array
        if layout is not None:
            into.layout = replace(layout, **dict(zip(more, packed[len(found) :])))


class CausalLM(KernelModule):
    config: ModelConfig
    Config: type[ModelConfig] = ModelConfig
    is_adapter = False  # a module of mlx-lm, which names its tensors itself
    # Tensors of a checkpoint that are not used: (pattern, reason).
    IGNORED_TENSORS: tuple[tuple[str, str], ...] = ((r"rotary_emb\.inv_freq$", "recomputed from the config"),)
    # Patterns of weights that stay float32 in any dtype. What is computed with them must be cast back.
    KEEP_FP32: tuple[str, ...] = ()
    # Activations exceed float16's range (65504): float16 files (most GGUF are) are computed in bfloat16.
    NEEDS_BF16 = False

    @classmethod
    def parse(cls, raw: dict) -> ModelConfig:
        return cls.Config.parse(raw)

    def cache_specs(self) -> list[LayerSpec | Shared]:
        """One KV cache spec per layer."""
        raise NotImplementedError

    def __call__(self, tokens: mx.array, views) -> mx.array:
        """Hidden states [N, hidden] for tokens [N], of any number of sequences packed end to end, for `logits`."""
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits for the rows that will be sampled."""
        raise NotImplementedError

    def head_modules(self) -> tuple[nn.Module, ...]:
        """The modules that `logits` reads in one kernel."""
        return ()

    def constants(self) -> list[mx.array]:
        """Every array of its modules, parameters or not, and the buffers they are packed into."""
        modules = self.modules()
        found = [v for module in modules for v in (*module.values(), *vars(module).values())]
        layouts = [layout for module in modules if (layout := getattr(module, "layout", None)) is not None]
        found += [a for layout in layouts for a in layout.arrays().values()]
        bundles = self.kernels.gpu.constant_buffers if self.kernels.gpu is not None else []
        return [v for v in found if isinstance(v, mx.array)] + bundles

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of activations, and so of keys and values."""
        raise NotImplementedError

    @staticmethod
    def rename(key: str) -> str:
        """Our name of a checkpoint's tensor."""
        return key

    @staticmethod
    def sanitize(config: ModelConfig, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Convert other checkpoint layouts to ours: stack experts, split fused matrices. Names are already ours.

        May modify `arrays`. A quantised X is X.weight, X.scales and, when affine, X.biases.
        """
        return arrays

    def fuse(self, kernels: Kernels = PLAIN) -> None:
        """Give modules their kernels and merge weights that are read together. Called once, after loading."""
        modules = self.modules()
        for module in modules:
            if isinstance(module, KernelModule):
                module.kernels = kernels
        for module in reversed(modules):  # from the inside out
            if isinstance(module, FusedModule):
                module.fuse()
                mx.eval(module.parameters())  # one at a time: old and merged matrices exist together
        self.pack_constants(*self.head_modules())
        for module in [] if self.is_adapter else self.modules():
            if not module.children():
                self.pack_constants(module)
