"""The exceptions of mlxrt. Messages say what was asked for, what was found and what to do.

`exit_code` is what the command line returns: 2 when the call itself was wrong, 1 when running it failed.
"""

NO_BACKEND = (
    "there is no MLX backend; install one: pip install 'mlxrt[cpu]' (Linux without a GPU), 'mlxrt[cuda12]' or "
    "'mlxrt[cuda13]' (NVIDIA), mlx (macOS)"
)


class MlxrtError(Exception):
    """Base class of all errors of mlxrt."""

    exit_code = 1


def quote(value: object) -> str:
    """A name or value from a file, for a message of one line: as it is, or escaped and truncated."""
    plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 120
    return str(value) if plain else ascii_of(value)[:120]


def show(value: object) -> str:
    """An argument as Python writes it, for a message of one line; truncated."""
    return " ".join(repr_of(value).split())[:80]


def repr_of(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        return f"a {type(value).__name__} that cannot be printed"


def ascii_of(value: object) -> str:
    return repr_of(value).encode("ascii", "backslashreplace").decode()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device or the host is full; MLX's only sign of it is a text."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("allocate" in str(error) or "out of memory" in str(error))
    )


# Requests and the engine


class BadRequest(MlxrtError):
    """A request, a parameter or an option is invalid."""

    exit_code = 2


class ContextOverflow(BadRequest):
    """The prompt does not fit the context."""

    def __init__(self, prompt: int, limit: int, hint: str = "shorten the prompt or raise max_context"):
        super().__init__(
            f"the prompt has {prompt} tokens, the context holds {limit} (one is needed for the answer); {hint}"
        )
        self.prompt, self.limit = prompt, limit


class UnsupportedContent(BadRequest):
    """A message has a part that is no text: an image, a sound, a file."""


class QueueFull(MlxrtError):
    """More requests wait than the engine accepts."""


class WontFit(MlxrtError):
    """More memory is needed than there is, even after everything else was evicted."""


class PromptWontFit(ContextOverflow, WontFit):
    """The prompt would fit the model, but not the memory the engine has."""


class EngineClosed(MlxrtError):
    """The engine was closed; load it again."""


class EngineFailed(EngineClosed):
    """A step failed, so the state of the engine is not valid any more; load it again."""


# Models and their files


class ModelNotFound(MlxrtError):
    """No alias, file, folder or repository has this name."""

    exit_code = 2


class HubError(MlxrtError):
    """The hub answered with an error, or did not answer."""


class UnsupportedModel(MlxrtError):
    """An architecture, or a value of a known config key, that mlxrt cannot compute."""


class BadCheckpoint(MlxrtError):
    """The files of a model contradict themselves, each other or the architecture."""


class BadTokenizer(MlxrtError):
    """The tokenizer's files cannot be used."""


class NoTokenizer(MlxrtError):
    """Text was given or asked for, and the model has no tokenizer."""


class BadTemplate(MlxrtError):
    """There is no chat template, or it refused the messages."""


# KV cache


class NoRoom(MlxrtError):
    """A block pool is exhausted. The scheduler answers it by evicting prefixes, then by preempting."""

    def __init__(self, text: str, pool: object = None):
        super().__init__(text)
        self.pool = pool


class EvictedBlock(MlxrtError):
    """A block handle was used after its block had been evicted."""


class CannotRewind(MlxrtError):
    """A layer's state does not exist at the requested length."""


class CacheCorrupt(MlxrtError):
    """A sequence's layers and its tokens disagree. Never caught."""


class BadSnapshot(MlxrtError):
    """A saved state is damaged, or belongs to another model or configuration."""


# Sampling and kernels


class StaleLogits(MlxrtError):
    """Logits were read after the step that produced them."""


class NoKernel(MlxrtError):
    """An op has no kernel for this device, shape or dtype, and kernels="strict" forbids plain MLX."""


class BadLogits(MlxrtError):
    """No token can be chosen: the logits are NaN or infinite, or every token is banned."""


class GrammarFailed(MlxrtError):
    """An answer cannot be held to its response_format any more: a limit of the grammar was reached."""
