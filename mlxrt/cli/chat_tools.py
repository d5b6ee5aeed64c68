"""Tools in a chat: Python functions that the model may call, each call run only after the user says yes."""

import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from ..text.parsing import ToolCall
from ..text.tools import read_tools
from .terminal import note, one_line

DECLINED = "The user did not allow this call."
MAX_RESULT = 100_000  # characters of a result that the model gets
Confirm = Callable[[str], bool]


def load_functions(path: Path) -> list[Callable[..., Any]]:
    """The public functions that a Python file defines. The file is run: its user names it."""
    spec = importlib.util.spec_from_file_location(f"mlxrt_tools_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadRequest(f"{path}: there is no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        raise BadRequest(f"{path}: {type(error).__name__}: {one_line(str(error))}") from None
    found: list[Callable[..., Any]] = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if not found:
        raise BadRequest(f"{path} defines no function without a leading underscore")
    read_tools(found)  # refuses what cannot be a tool
    return found


@dataclass
class ToolRunner:
    """Runs the model's calls, those the user allows."""

    confirm: Confirm = lambda question: False
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def answer(self, call: ToolCall) -> dict[str, Any]:
        """The message with the call's result, for the model."""
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": self._run(call)[:MAX_RESULT]}

    def _run(self, call: ToolCall) -> str:
        function = self.functions.get(call.name)
        if call.error or call.parsed is None:
            return f"error: the arguments are {call.error}"
        if function is None:
            return f"error: {call.name} cannot be run here"
        try:
            allowed = self.confirm(f"run {call.name}({one_line(call.arguments)})? [y/N] ")
        except KeyboardInterrupt:
            allowed = False
        if not allowed:
            note(f"{call.name} was not run")
            return DECLINED
        try:
            value = function(**call.parsed)
        except KeyboardInterrupt:
            note(f"{call.name} was stopped")
            return "error: the user stopped this call"
        except Exception as error:  # a user's function may raise anything; the model is told
            note(f"{call.name}: {type(error).__name__}: {error}")
            return f"error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else to_json(value)


def to_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
