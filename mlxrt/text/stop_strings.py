"""Stop strings, matched on text: how the text was split into tokens makes no difference."""

import re

from ..errors import BadRequest, show


def partial_match(text: str, pattern: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of pattern."""
    for size in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:size]):
            return size
    return 0


class StopMatcher:
    """Passes text through until a stop string appears; holds back only what may become one."""

    def __init__(self, stops: tuple[str, ...]):
        if any(not isinstance(s, str) or not s for s in stops):
            raise BadRequest(f"stop must be non-empty strings, not {show(stops)}")
        self.stops = tuple(stops)
        self.matched_stop: str | None = None
        self._held = ""
        self._pattern = re.compile("|".join(map(re.escape, self.stops))) if self.stops else None

    @property
    def matched(self) -> bool:
        return self.matched_stop is not None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be emitted now, and whether a stop string matched; after a match nothing is emitted."""
        if self.matched or self._pattern is None:
            return ("" if self.matched else text), self.matched
        text = self._held + text
        found, cut = self._pattern.search(text), len(text) - max(partial_match(text, stop) for stop in self.stops)
        if found and found.start() <= cut:
            self.matched_stop, self._held = found[0], ""
            return text[: found.start()], True
        self._held = text[cut:]  # may contain a full match: one that starts earlier can still complete
        return text[:cut], False

    def finish(self) -> str:
        """The text held back for a stop string that never completed, up to one that did."""
        rest, self._held = self._held, ""
        if self._pattern is None or (found := self._pattern.search(rest)) is None:
            return rest
        self.matched_stop = found[0]
        return rest[: found.start()]
