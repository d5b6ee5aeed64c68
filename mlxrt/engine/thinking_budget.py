"""Thinking budgets: when a request's reasoning has used its tokens, the end of it is forced.

The tokens that end it come instead of sampled ones. A step that is launched ahead would not know of them, so as the
budget runs out the sequence waits for its tokens before the next step: the end comes exactly where it must, and what
else runs is not touched.
"""

from dataclasses import dataclass

from ..text.parsing import OutputParser
from .sequence import Sequence


@dataclass
class ThinkingBudget:
    parser: OutputParser
    tokens: int
    closing: tuple[int, ...]  # what ends the reasoning
    spent: bool = False

    def update(self, seq: Sequence) -> None:
        """After each token, and before the first."""
        if self.spent:
            seq.max_pending = 0 if seq.forced else None
            return
        left = self.tokens - self.parser.reasoning_tokens
        if self.parser.thinking and left <= 0:
            seq.forced, seq.max_pending, self.spent = list(self.closing), 0, True
            self.parser.end_thinking()  # a block that opens later is no more reasoning
        else:
            # Of the tokens on the device one may open a block, the others belong to it.
            seq.max_pending = left + (not self.parser.thinking)
