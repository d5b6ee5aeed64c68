"""Tools as templates and parsers want them: OpenAI's form, from schemas or from Python functions."""

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import BadRequest

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object"}
PARAMETER = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


def read_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools as {"type": "function", "function": {...}}; a function with its name alone is wrapped, a callable read."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise BadRequest(f"tools must be a list of dicts or functions, not {type(tools).__name__}")
    found = [read_tool(i, tool) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"two tools are named {twice!r}")
    return found


def read_tool(index: int, tool: Any) -> dict[str, Any]:
    if callable(tool) and not isinstance(tool, Mapping):
        return describe_function(tool)
    if not isinstance(tool, Mapping):
        raise BadRequest(f"tool {index} must be a dict or a function, not {type(tool).__name__}")
    if "function" in tool:
        function = tool["function"]
    else:
        function = {k: v for k, v in tool.items() if k not in ("type", "input_schema")}
        if "input_schema" in tool:
            function["parameters"] = tool["input_schema"]
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"tool {index} has no function name")
    return {**({} if "function" not in tool else tool), "type": "function", "function": dict(function)}


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """The schema of the arguments, by the tool's name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}


def describe_function(function: Callable) -> dict[str, Any]:
    """A tool from a Python function: its annotations give the types, its docstring the descriptions."""
    try:
        hints, signature = get_type_hints(function), inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise BadRequest(f"{getattr(function, '__name__', function)!r} cannot be a tool: {error}") from None
    doc = inspect.getdoc(function) or ""
    described = {found[1]: found[2] for line in doc.splitlines() if (found := PARAMETER.match(line))}
    properties, required = {}, []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise BadRequest(f"{function.__name__} cannot be a tool: {name} has no name to call it by")
        schema = type_schema(hints.get(name))
        properties[name] = schema | ({"description": described[name]} if name in described else {})
        if parameter.default is parameter.empty:
            required.append(name)
    text = doc.split("\n\n")[0].replace("\n", " ").strip()
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": function.__name__, "description": text, "parameters": parameters}}


def type_schema(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [type_schema(a) for a in arguments if a is not type(None)]
        return inner[0] if len(inner) == 1 else {"anyOf": inner}
    if origin is Literal:
        return {"type": TYPES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if (origin or hint) in (list, tuple, set) and arguments:
        return {"type": "array", "items": type_schema(arguments[0])}
    kind = TYPES.get(origin or hint)
    return {"type": kind} if kind else {}
