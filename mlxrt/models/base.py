"""What the runtime asks of a model. A model knows nothing of batches, schedulers or masks."""

from collections.abc import Iterable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..cache.memory import LayerSpec, Shared
from ..kernels import PLAIN, Kernels
from .config import ModelConfig


def arrays_in(modules: Iterable[nn.Module | None]) -> list[tuple[nn.Module, str]]:
    """(module, name) of every array that is directly in one of them."""
    return [(m, name) for m in modules if m is not None for name, a in m.items() if isinstance(a, mx.array)]


class Computing(nn.Module):
    """A module that computes by kernels where there are any."""

    kernels: Kernels = PLAIN

    def together(self, *modules: nn.Module | None) -> None:
        """Lay what these hold into one buffer, for the kernels that read it all."""
        if self.kernels.gpu is None:
            return
        held = arrays_in(modules)
        for (module, name), array in zip(held, self.kernels.gpu.pack_constants([m[name] for m, name in held])):
            module[name] = array


class Fusible(Computing):
    """A module some of whose arrays are read together and can be one. Those inside it have been asked before it."""

    def fuse(self) -> None:
        raise NotImplementedError

    def lead(self, *norms: nn.Module, into: nn.Module) -> None:
        """Lay norms beside the matrix that reads what they make, the `entry` of a part, where it names one; and beside
        both what a part's `layout` holds, for a kernel that goes on with the product."""
        if self.kernels.gpu is None:
            return
        layout = getattr(into, "layout", None)
        more = {} if layout is None else layout.held()
        held = arrays_in((*norms, getattr(into, "entry", None)))
        laid = self.kernels.gpu.pack_constants([*(m[name] for m, name in held), *more.values()])
        for (module, name), array in zip(held, laid):
            module[name] = array
        if layout is not None:
            into.layout = replace(layout, **dict(zip(more, laid[len(held) :])))


class CausalLM(Computing):
    config: ModelConfig
    Config: type[ModelConfig] = ModelConfig
    adapted = False  # another library's module: it names its tensors itself
    # Checkpoint keys that are dropped on purpose: (pattern, reason).
    DROPS: tuple[tuple[str, str], ...] = ((r"rotary_emb\.inv_freq$", "recomputed from the config"),)
    # Weights that stay float32 whatever the model's dtype: patterns. Their results must be cast back.
    WIDE: tuple[str, ...] = ()
    # Trained in bfloat16 with activations beyond 65504: files in float16 (most GGUF are) are computed in bfloat16.
    OUTGROWS_HALF = False

    @classmethod
    def parse(cls, raw: dict) -> ModelConfig:
        return cls.Config.parse(raw)

    def cache_specs(self) -> list[LayerSpec | Shared]:
        """One spec per layer: the whole of what a model says about caching."""
        raise NotImplementedError

    def __call__(self, tokens: mx.array, views) -> mx.array:
        """Hidden states [N, hidden] for tokens [N], of any number of sequences packed end to end, for `logits`."""
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits for the rows that will be sampled."""
        raise NotImplementedError

    def last(self) -> tuple[nn.Module, ...]:
        """The modules that `logits` reads together."""
        return ()

    def constants(self) -> list[mx.array]:
        """Every array its modules hold, parameters or not, and the buffers they lie in together."""
        found = [v for module in self.modules() for v in (*module.values(), *vars(module).values())]
        bundles = self.kernels.gpu.constant_buffers if self.kernels.gpu is not None else []
        return [v for v in found if isinstance(v, mx.array)] + bundles

    @property
    def dtype(self) -> mx.Dtype:
        """What activations, and so keys and values, are computed in."""
        raise NotImplementedError

    @staticmethod
    def rename(key: str) -> str:
        """A checkpoint's weight name to ours."""
        return key

    @classmethod
    def arrange(cls, config: ModelConfig, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """Tensors of other checkpoint layouts as ours: experts stacked, fused matrices split. Names are ours already.

        May take `arrays` apart. A packed X is X.weight, X.scales and, when affine, X.biases.
        """
        return arrays

    def fuse(self, kernels: Kernels = PLAIN) -> None:
        """Join what is read together, and hand out the kernels. Called once, when all weights are in."""
        modules = self.modules()
        for module in modules:
            if isinstance(module, Computing):
                module.kernels = kernels
        for module in reversed(modules):  # from the inside out
            if isinstance(module, Fusible):
                module.fuse()
                mx.eval(module.parameters())  # one at a time: old and joined matrices exist together
        self.together(*self.last())
        for module in [] if self.adapted else self.modules():
            if not module.children():
                self.together(module)
