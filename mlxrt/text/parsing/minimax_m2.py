"""MiniMax M2: `<minimax:tool_call><invoke name="N"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""

import re

from .calls import CallFormat
from .xml_calls import XmlBlock, XmlTags

TAGS = XmlTags(
    wrapper="<minimax:tool_call>",
    wrapper_end="</minimax:tool_call>",
    function="<invoke name=",
    function_end="</invoke>",
    name=re.compile(r"""["']?([^"'>\n]+)["']?\s*>"""),
    parameter=re.compile(
        r"""<parameter name=["']?([^"'>\n]+)["']?\s*>(.*?)(?:</parameter>|(?=<parameter name=)|\Z)""", re.DOTALL
    ),
)
MINIMAX_M2 = CallFormat(
    "minimax_m2",
    lambda _: XmlBlock(TAGS),
    opens=(TAGS.wrapper, TAGS.function),
    closes=(TAGS.function_end, TAGS.wrapper_end),
)
