"""Every error a user can meet. Each says what was asked, what was there, and what to do.

`exit_code` is what the command line returns: 2 when the call itself was wrong, 1 when running it failed.
"""


class MlxrtError(Exception):
    """Base of everything raised on purpose."""

    exit_code = 1


def shown(value: object) -> str:
    """A name or value out of a file, fit for one line of a message: as it is, or escaped and cut."""
    plain = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 120
    return str(value) if plain else ascii(value)[:120]


# What the caller asked for


class BadRequest(MlxrtError):
    """A request, a parameter or an option that can never be served as given."""

    exit_code = 2


class ContextOverflow(BadRequest):
    """The prompt does not fit the context."""

    def __init__(self, prompt: int, limit: int, hint: str = "shorten the prompt or raise max_context"):
        super().__init__(
            f"the prompt has {prompt} tokens, the context holds {limit} (one is needed for the answer); {hint}"
        )
        self.prompt, self.limit = prompt, limit


class QueueFull(MlxrtError):
    """More requests wait than the engine accepts."""


class WontFit(MlxrtError):
    """The memory needed is more than there is, whatever else is given up."""


class EngineClosed(MlxrtError):
    """The engine was closed; load it again."""


# What a model comes from


class ModelNotFound(MlxrtError):
    """No alias, file, folder or repository goes by this name."""

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
    """Text goes in or out and the model came without a tokenizer."""


class BadTemplate(MlxrtError):
    """There is no chat template, or it refused the messages."""


# Memory of sequences


class NoRoom(MlxrtError):
    """A block pool is exhausted. The scheduler answers it by evicting prefixes, then by preempting."""

    def __init__(self, text: str, pool: object = None):
        super().__init__(text)
        self.pool = pool  # which one


class EvictedBlock(MlxrtError):
    """A block handle outlived the block's content."""


class CannotRewind(MlxrtError):
    """A layer's state does not exist at the requested length."""


class CacheCorrupt(MlxrtError):
    """A sequence's layers and its tokens disagree. Never caught."""


class BadSnapshot(MlxrtError):
    """A saved state is damaged, or belongs to another model or configuration."""


# Steps


class StaleLogits(MlxrtError):
    """Logits were read after the step that produced them."""


class NoKernel(MlxrtError):
    """An op has no kernel for this device, shape or dtype, and kernels="strict" forbids plain MLX."""


class BadLogits(MlxrtError):
    """No token can be chosen: the logits are NaN or infinite, or every token is banned."""
