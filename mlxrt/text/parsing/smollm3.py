"""SmolLM3: Hermes's form for its XML tools, `<code>f(x="")</code>` for its Python tools."""

from . import hermes, python_calls
from .calls import CallFormat

SMOLLM3 = CallFormat(
    "smollm3",
    lambda marker: python_calls.CodeBlock() if marker == python_calls.OPEN else hermes.HermesBlock(),
    opens=(hermes.OPEN, python_calls.OPEN),
    closes=(hermes.CLOSE, python_calls.CLOSE),
)
