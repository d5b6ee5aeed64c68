"""Where a text must end. Knows characters only: how the text was cut into tokens makes no difference here."""

import re

from ..errors import BadRequest


def held_back(text: str, pattern: str) -> int:
    """Length of the longest end of text that is a proper beginning of pattern."""
    for size in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:size]):
            return size
    return 0


class StopMatcher:
    """Passes text on until a stop appears; of an unfinished one it keeps back only what may still complete."""

    def __init__(self, stops: tuple[str, ...]):
        if any(not isinstance(s, str) or not s for s in stops):
            raise BadRequest(f"stop must be non-empty strings, not {stops!r}")
        self.stops = tuple(stops)
        self.matched = False
        self._held = ""
        self._any = re.compile("|".join(map(re.escape, self.stops))) if self.stops else None

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop was met; after one, nothing more is shown."""
        if self.matched or self._any is None:
            return ("" if self.matched else text), self.matched
        text = self._held + text
        found, cut = self._any.search(text), len(text) - max(held_back(text, stop) for stop in self.stops)
        if found and found.start() <= cut:
            self.matched, self._held = True, ""
            return text[: found.start()], True
        self._held = text[cut:]  # with a whole stop in it, perhaps: one that starts earlier may still complete
        return text[:cut], False

    def finish(self) -> str:
        """The text kept back for a stop that never completed, up to one that did."""
        rest, self._held = self._held, ""
        if self._any is None or (found := self._any.search(rest)) is None:
            return rest
        self.matched = True
        return rest[: found.start()]
