"""The option `thinking`: whether a model reasons before it answers."""

from ..errors import BadRequest, show

THINKING = ("auto", "on", "off")


def merge_thinking(thinking: str, enable_thinking: bool | None) -> str:
    """`thinking`, of which `enable_thinking` is an alias; BadRequest when both are given and differ."""
    if not isinstance(thinking, str) or thinking not in THINKING:
        raise BadRequest(f"thinking must be {', '.join(THINKING)}, not {show(thinking)}")
    if enable_thinking is None:
        return thinking
    if not isinstance(enable_thinking, bool):
        raise BadRequest(f"enable_thinking must be true or false, not {show(enable_thinking)}")
    wanted = "on" if enable_thinking else "off"
    if thinking not in ("auto", wanted):
        raise BadRequest(f"thinking={show(thinking)} and enable_thinking={enable_thinking} contradict each other")
    return wanted
