"""How families write their thinking: between two markers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    open: str
    close: str
    header: str = ""  # what follows the opening marker and is no thinking: a channel's name

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close)


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
GEMMA4_CHANNEL = ReasoningFormat("gemma4", "<|channel>", "<channel|>", header="thought\n")
