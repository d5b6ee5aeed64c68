"""What a model wrote, taken apart: reasoning, tool calls and the answer, read token by token."""

from .parser import OutputParser
from .segments import Segment, ToolCall, ToolCallDelta
from .select import OutputFormat, find_format

__all__ = ["OutputFormat", "OutputParser", "Segment", "ToolCall", "ToolCallDelta", "find_format"]
