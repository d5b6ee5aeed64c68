"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

import re

from .calls import CallFormat
from .xml_calls import XmlBlock, XmlTags

TAGS = XmlTags(
    wrapper="<tool_call>",
    wrapper_end="</tool_call>",
    function="<function=",
    function_end="</function>",
    name=re.compile(r"([^>\n]+)>"),
    parameter=re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL),
)
QWEN3_CODER = CallFormat(
    "qwen3_coder",
    lambda _: XmlBlock(TAGS),
    opens=(TAGS.wrapper, TAGS.function),
    closes=(TAGS.function_end, TAGS.wrapper_end),
)
