"""The option `thinking`: whether a model reasons before it answers."""

from ..errors import BadRequest

THINKING = ("auto", "on", "off")


def merge_thinking(thinking: str, enable_thinking: bool | None) -> str:
    """`thinking`, of which `enable_thinking` is an alias; BadRequest when both are given and differ."""
    if thinking not in THINKING:
        raise BadRequest(f"thinking must be {', '.join(THINKING)}, not {thinking!r:.40}")
    if enable_thinking is None:
        return thinking
    if not isinstance(enable_thinking, bool):
        raise BadRequest(f"enable_thinking must be true or false, not {enable_thinking!r:.40}")
    wanted = "on" if enable_thinking else "off"
    if thinking not in ("auto", wanted):
        raise BadRequest(f"thinking={thinking!r} and enable_thinking={enable_thinking} contradict each other")
    return wanted
