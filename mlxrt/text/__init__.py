"""Text to tokens and back: vocabularies, chat templates, the streaming detokenizer, stop strings."""

from .detokenizer import Detokenizer
from .stops import StopMatcher
from .tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer"]
