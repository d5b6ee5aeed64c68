"""Tokens in, text out, as early as it is certain. Refuses to know where a vocabulary came from."""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import BadRequest
from .decoding import Stage


class Detokenizer:
    """The text of one stream of tokens. What `push` and `finish` give, joined, is the text of all tokens at once."""

    def __init__(self, size: int, piece: Callable[[int], Any], stages: Sequence[Stage]):
        self._size, self._piece, self._stages = size, piece, tuple(stages)

    def push(self, token: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._size:
            raise BadRequest(f"token {token!r} is not in the vocabulary; ids go from 0 to {self._size - 1}")
        piece = self._piece(token)
        if piece is None:
            return ""
        pieces = [piece]
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def finish(self) -> str:
        """The rest, now that no token follows."""
        pieces: list[Any] = []
        for stage in self._stages:
            pieces = (stage.push(pieces) if pieces else []) + stage.finish()
        return "".join(pieces)
