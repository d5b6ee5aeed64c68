"""Tools with schemas of the forms that coding agents send: their names, types and keywords, texts our own."""

from typing import Any

DRAFT = "https://json-schema.org/draft/2020-12/schema"
STRING: dict = {"type": "string"}
TEXT: dict = {"description": "free text", "type": "string"}
FLAG: dict = {"type": "boolean", "description": "yes or no"}
COUNT: dict = {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}
STATE: dict = {"type": "string", "enum": ["pending", "in_progress", "completed"]}
OPTION: dict = {
    "type": "object",
    "properties": {"label": TEXT, "description": TEXT, "preview": TEXT},
    "required": ["label", "description"],
    "additionalProperties": False,
}


def make_tool(name: str, properties: dict[str, Any], required: str = "", **more: Any) -> dict:
    schema = {"type": "object", "properties": properties, "required": required.split(), **more}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": schema}}


def make_closed(name: str, properties: dict[str, Any], required: str = "") -> dict:
    return make_tool(name, properties, required, additionalProperties=False, **{"$schema": DRAFT})


QUESTION: dict = {
    "type": "object",
    "properties": {
        "question": TEXT,
        "header": TEXT,
        "options": {"type": "array", "items": OPTION, "minItems": 2, "maxItems": 4},
        "multiSelect": {"default": False, "type": "boolean"},
    },
    "required": ["question", "header", "options", "multiSelect"],
    "additionalProperties": False,
}
TODOS: dict = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "content": {"type": "string", "minLength": 1},
            "status": STATE,
            "activeForm": {"minLength": 1, **STRING},
        },
        "required": ["content", "status", "activeForm"],
        "additionalProperties": False,
    },
}
METADATA: dict = {"type": "object", "propertyNames": STRING, "additionalProperties": {}}
ANSWERS: dict = {"type": "object", "propertyNames": STRING, "additionalProperties": STRING}

CLAUDE_CODE = (
    make_closed("Bash", {"command": TEXT, "timeout": {"type": "number"}, "run_in_background": FLAG}, "command"),
    make_closed("Read", {"file_path": TEXT, "offset": {"minimum": 0, **COUNT}, "limit": COUNT}, "file_path"),
    make_closed("Write", {"file_path": TEXT, "content": TEXT}, "file_path content"),
    make_closed(
        "Edit",
        {"file_path": TEXT, "old_string": TEXT, "new_string": TEXT, "replace_all": {"default": False, **FLAG}},
        "file_path old_string new_string",
    ),
    make_closed(
        "Grep",
        {
            "pattern": TEXT,
            "output_mode": {"type": "string", "enum": ["content", "files_with_matches", "count"]},
            "-B": {"type": "number"},
            "-i": FLAG,
            "head_limit": {"type": "number"},
        },
        "pattern",
    ),
    make_closed("WebFetch", {"url": {"type": "string", "format": "uri"}, "prompt": TEXT}, "url prompt"),
    make_closed(
        "WebSearch",
        {"query": {"type": "string", "minLength": 2}, "allowed_domains": {"type": "array", "items": STRING}},
        "query",
    ),
    make_closed(
        "NotebookEdit", {"path": TEXT, "edit_mode": {"enum": ["replace", "insert", "delete"], **STRING}}, "path"
    ),
    make_closed("TodoWrite", {"todos": TODOS}, "todos"),
    make_closed(
        "Task",
        {
            "prompt": TEXT,
            "model": {"type": "string", "enum": ["sonnet", "opus", "haiku"]},
            "isolation": {"const": "worktree", **STRING},
        },
        "prompt",
    ),
    make_closed(
        "TaskUpdate",
        {"id": TEXT, "status": {"anyOf": [STATE, {"type": "string", "const": "deleted"}]}, "metadata": METADATA},
        "id",
    ),
    make_closed("Cron", {"cron": {"type": "string", "pattern": "^[0-9*/, -]{9,40}$"}, "recurring": FLAG}, "cron"),
    make_closed(
        "AskUserQuestion",
        {"questions": {"type": "array", "items": QUESTION, "minItems": 1, "maxItems": 4}, "answers": ANSWERS},
        "questions",
    ),
    make_closed("EnterPlanMode", {}),
    make_tool("ExitPlanMode", {"prompts": {"type": "array", "items": OPTION}}, additionalProperties={}),
)
PLAN_STEP: dict = {
    "type": "object",
    "properties": {"step": STRING, "status": STATE},
    "required": ["step", "status"],
    "additionalProperties": False,
}
CODEX = (
    make_tool(
        "exec_command",
        {"cmd": TEXT, "yield_time_ms": {"type": "number"}, "tty": FLAG},
        "cmd",
        additionalProperties=False,
    ),
    make_tool(
        "write_stdin", {"session_id": {"type": "number"}, "chars": TEXT}, "session_id", additionalProperties=False
    ),
    make_tool(
        "update_plan",
        {"explanation": STRING, "plan": {"type": "array", "items": PLAN_STEP}},
        "plan",
        additionalProperties=False,
    ),
    make_tool(
        "request_user_input", {"questions": {"type": "array", "items": OPTION}}, "questions", additionalProperties=False
    ),
    make_tool("view_image", {"path": TEXT}, "path", additionalProperties=False),
    make_tool(
        "shell", {"command": {"type": "array", "items": STRING}, "workdir": TEXT}, "command", additionalProperties=False
    ),
    make_tool("list_mcp_resources", {"server": TEXT, "cursor": TEXT}, additionalProperties=False),
)
QWEN_TODO: dict = {
    "type": "object",
    "properties": {"id": STRING, "content": {"type": "string", "minLength": 1}, "status": STATE},
    "required": ["content", "status", "id"],
    "additionalProperties": False,
}
QWEN_CODE = (
    make_tool("list_directory", {"path": TEXT, "ignore": {"type": "array", "items": STRING}}, "path"),
    make_tool("read_file", {"absolute_path": TEXT, "offset": {"type": "number"}}, "absolute_path"),
    make_tool("grep_search", {"pattern": TEXT, "limit": {"type": "number"}}, "pattern"),
    make_tool("glob", {"pattern": TEXT, "path": TEXT}, "pattern"),
    make_tool("edit", {"file_path": TEXT, "old_string": TEXT, "new_string": TEXT}, "file_path old_string new_string"),
    make_tool("write_file", {"file_path": TEXT, "content": TEXT}, "file_path content"),
    make_tool("run_shell_command", {"command": TEXT, "is_background": FLAG}, "command is_background"),
    make_tool("save_memory", {"fact": TEXT, "scope": {"type": "string", "enum": ["global", "project"]}}, "fact"),
    make_tool("todo_write", {"todos": {"type": "array", "items": QWEN_TODO}}, "todos", **{"$schema": DRAFT}),
    make_tool("task", {"description": TEXT, "prompt": TEXT}, "description prompt", additionalProperties=False),
    make_tool("exit_plan_mode", {"plan": TEXT}, "plan"),
)
AGENTS = {"claude code": CLAUDE_CODE, "codex": CODEX, "qwen code": QWEN_CODE}
NOT_STRICT = {"TaskUpdate", "AskUserQuestion"}  # propertyNames is left out of what is enforced
