"""Text to tokens and back: tokenizers, chat templates, the streaming detokenizer, stop strings."""

from .detokenizer import Detokenizer
from .stop_strings import StopMatcher
from .tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer"]
