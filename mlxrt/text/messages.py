"""One form of chat messages for every template.

Clients send what the OpenAI protocol allows: arguments as a string, no content, lists of parts, system messages in the
middle. Templates take some of it, print some of it wrongly, and refuse the rest. `normalise_messages` brings messages
into the form a template handles; which that is, `find_features` learns by rendering small conversations with it.
Messages that a template handles as they are stay as they are.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import BadRequest, UnsupportedContent, show

Message = dict[str, Any]
Render = Callable[..., str | None]  # messages, and variables by name; None when the template refuses them

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA_KEYS = ("images", "audio", "videos")  # beside the content, as Ollama's clients send them
THINKING_FIELD = re.compile(r"""\.thinking\b|\[['"]thinking['"]\]|['"]thinking['"] in """)
THINKING_PART = re.compile(r"""type['"]?\]?\s*==\s*['"]thinking['"]""")
HERMES_TOOLS = """# Tools

You can call functions. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
You get what it returns between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class TemplateFeatures:
    """What a chat template can express."""

    system: bool = True
    late_system: bool = True  # a system message that is not the first
    developer: bool = False
    repeats: bool = True  # two messages of one role in a row
    empty_answers: bool = True
    tools: str = "tools"  # the variable that takes them; empty: none does
    calls: bool = True  # tool calls and their results
    several_calls: bool = True  # in one message
    call_arguments: str = "object"  # or "string"
    short_ids: bool = False  # ids of calls are nine letters and digits
    thinking: str = ""  # how past reasoning is given beside reasoning_content: "field", "part" or not
    parts: bool = False  # contents must be lists of parts


def find_features(render: Render, source: str) -> TemplateFeatures:
    """Learn what a template can do from what it makes of small conversations."""
    user, answer = {"role": "user", "content": "qzuserqz"}, {"role": "assistant", "content": "qzanswerqz"}
    system = {"role": "system", "content": "qzsystemqz"}
    shows = lambda text, *words: text is not None and all(word in text for word in words)  # noqa: E731
    if not shows(render([user]), "qzuserqz"):
        as_parts = [{"role": "user", "content": [{"type": "text", "text": "qzuserqz"}]}]
        if shows(render(as_parts), "qzuserqz"):
            inner = find_features(lambda messages, **v: render([to_parts(m) for m in messages], **v), source)
            return replace(inner, parts=True)
        return TemplateFeatures()  # it does not take the simplest conversation: what is asked of it will say why
    has_system = shows(render([system, user]), "qzsystemqz")
    twice = [user, user | {"content": "qzagainqz"}, answer, answer | {"content": "qzmoreqz"}, user]
    field = "field" if THINKING_FIELD.search(source) else ""
    features = TemplateFeatures(
        system=has_system,
        late_system=has_system and shows(render([user, answer, system, user]), "qzsystemqz"),
        developer="developer" in source,
        repeats=shows(render(twice), "qzuserqz", "qzagainqz", "qzanswerqz", "qzmoreqz"),
        empty_answers=render([user, answer | {"content": ""}, user]) is not None,
        tools=next(
            (name for name in ("tools", "xml_tools") if shows(render([user], **{name: [TOOL]}), "qztoolqz")),
            "tools" if re.search(r"\btools\b", source) and render([user], tools=[TOOL]) is not None else "",
        ),
        thinking="part" if THINKING_PART.search(source) else field,
    )
    return find_call_features(render, features, user)


TOOL = {
    "type": "function",
    "function": {
        "name": "qztoolqz",
        "description": "qzdescriptionqz",
        "parameters": {"type": "object", "properties": {"qzkeyqz": {"type": "string", "description": "qz"}}},
    },
}


def find_call_features(render: Render, features: TemplateFeatures, user: Message) -> TemplateFeatures:
    """Which form of a tool call the template prints rightly, if any."""

    def converse(count: int, form: TemplateFeatures) -> list[Message]:
        calls = [make_call(f"qzcall{i}", "qztoolqz", {"qzkeyqz": f"qzvalue{i}qz"}) for i in range(count)]
        results = [{"role": "tool", "content": f"qzresult{i}qz", "tool_call_id": f"qzcall{i}"} for i in range(count)]
        messages = [user, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        return [finish_call_message(m, form) for m in name_results(messages)]

    for short in (False, True):
        for arguments in ("object", "string"):
            form = replace(features, call_arguments=arguments, short_ids=short)
            text = render(converse(1, form), tools=[TOOL] if features.tools else None)
            if text is None or not all(w in text for w in ("qztoolqz", "qzvalue0qz", "qzresult0qz")):
                continue
            if "{'qz" in text or '\\"qzkey' in text:  # Python's own form, or encoded twice
                continue
            text = render(converse(2, form), tools=[TOOL] if features.tools else None)
            several = text is not None and all(f"qz{w}qz" in text for w in ("value0", "value1", "result0", "result1"))
            return replace(form, several_calls=several)
    return replace(features, calls=False, several_calls=False)


def make_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Messages into one form


def normalise_messages(
    messages: Sequence[Mapping[str, Any]],
    features: TemplateFeatures,
    tools: Sequence[Mapping[str, Any]] | None = None,
    source: str = "",
) -> list[Message]:
    """The messages as the template handles them; `tools` only where it takes none itself, as text for the model."""
    found = name_results([read_message(i, m, features, source) for i, m in enumerate(messages)])
    if tools and not features.tools:
        found = add_system(found, describe_tools(tools))
    if not features.calls:
        found = [write_calls(m) for m in found]
    elif not features.several_calls:
        found = split_calls(found)
    if not features.late_system:
        found = gather_system(found)
    if not features.system:
        found = move_system(found)
    if not features.empty_answers:
        found = [m for m in found if m["role"] != "assistant" or m["content"] or m.get("tool_calls")]
    if not features.repeats:
        found = join_repeats(found)
    found = [finish_call_message(add_thinking(m, features), features) for m in found]
    return [to_parts(m) for m in found] if features.parts else found


def read_message(index: int, message: Mapping[str, Any], features: TemplateFeatures, source: str) -> Message:
    """One message: a known role, its content as text, calls with parsed arguments, reasoning in one field."""
    role = message.get("role")
    role = {"function": "tool", "developer": "developer" if features.developer else "system"}.get(str(role), role)
    if role not in ROLES and not (isinstance(role, str) and re.search(rf"""['"]{re.escape(role)}['"]""", source)):
        raise BadRequest(f"message {index} has role {show(role)}; known are {', '.join(ROLES)}")
    if media := next((key for key in MEDIA_KEYS if message.get(key)), None):
        raise UnsupportedContent(f"message {index} has {media}; only text can be read")
    kept = {k: v for k, v in message.items() if k not in ("reasoning", "thinking", "function_call", *MEDIA_KEYS)}
    text, thought = join_parts(message.get("content"), index)
    found: Message = kept | {"role": role, "content": text}
    reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking") or thought
    if role == "assistant" and not reasoning and text.lstrip().startswith("<think>") and "</think>" in text:
        inside, _, after = text.partition("</think>")
        reasoning, found["content"] = inside.partition("<think>")[2].strip(), after.lstrip("\n")
    found.pop("reasoning_content", None)
    if isinstance(reasoning, str) and reasoning and role == "assistant":
        found["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise BadRequest(f"message {index}: tool_calls must be a list of calls, not {type(calls).__name__}")
    calls = calls or ([{"function": message["function_call"]}] if message.get("function_call") else [])
    found.pop("tool_calls", None)
    if calls and role == "assistant":
        found["tool_calls"] = [read_call(index, i, call) for i, call in enumerate(calls)]
    return found


def join_parts(content: Any, index: int) -> tuple[str, str]:
    """A content as text, and the thinking that is among its parts. UnsupportedContent names any other part."""
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, (list, tuple)):
        if isinstance(content, (Mapping, int, float)):
            return json.dumps(content, ensure_ascii=False), ""  # a tool's result that was not written out
        raise BadRequest(f"message {index}: content must be text or a list of parts, not {type(content).__name__}")
    text, thought = [], []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            text.append(part)
        elif kind in TEXT_PARTS and isinstance(part.get("text"), str):
            text.append(part["text"])
        elif kind in ("thinking", "reasoning") and isinstance(part.get("thinking", part.get("text")), str):
            thought.append(part.get("thinking", part.get("text")))
        elif kind == "refusal" and isinstance(part.get("refusal"), str):  # what an assistant said instead
            text.append(part["refusal"])
        elif kind in TEXT_PARTS:
            raise BadRequest(f"message {index} has a part of type {show(kind)} without its text")
        else:
            raise UnsupportedContent(f"message {index} has a part of type {show(kind)}; only text can be read")
    return "".join(text), "\n".join(thought)


def read_call(index: int, number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else call
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"message {index}: tool call {number} has no function name")
    id = call.get("id")
    return make_call(id if isinstance(id, str) and id else "", name, read_arguments(function.get("arguments")))


def read_arguments(arguments: Any) -> Any:
    """An object where it is one; text that is none stays as it is."""
    if not isinstance(arguments, str):
        return dict(arguments) if isinstance(arguments, Mapping) else {} if arguments is None else arguments
    try:
        value = json.loads(arguments, strict=False) if arguments.strip() else None
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else {} if value is None else arguments


def name_results(messages: list[Message]) -> list[Message]:
    """Give every call an id, and every result the id and the name of its call."""
    found: list[Message] = []
    open_calls: list[dict[str, Any]] = []
    for n, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [call | {"id": call["id"] or f"call_{n}_{i}"} for i, call in enumerate(calls)]
            message, open_calls = message | {"tool_calls": calls}, list(calls)
        elif message["role"] == "tool":
            id = message.get("tool_call_id")
            call = next((c for c in open_calls if c["id"] == id), open_calls[0] if open_calls and not id else None)
            if call is not None:
                open_calls.remove(call)
                message = {"name": call["function"]["name"], **message, "tool_call_id": call["id"]}
        found.append(message)
    return found


# What templates cannot do


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return HERMES_TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def add_system(messages: list[Message], text: str) -> list[Message]:
    """Append to the first system message, or make one."""
    if messages and messages[0]["role"] in ("system", "developer"):
        return [messages[0] | {"content": join_text(messages[0]["content"], text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def join_text(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def write_calls(message: Message) -> Message:
    """Calls and results as text, in Hermes's form."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}, ensure_ascii=False)
        + "\n</tool_call>"
        for c in message["tool_calls"]
    ]
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return rest | {"content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}


def split_calls(messages: list[Message]) -> list[Message]:
    """A message with several calls becomes as many pairs of a call and its result."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            rest = message if i == 0 else {"role": "assistant", "content": ""}
            mine = [r for r in results if r.get("tool_call_id") == call["id"]]
            found += [rest | {"tool_calls": [call]}, *mine]
        ids = [call["id"] for call in calls]
        found += [r for r in results if r.get("tool_call_id") not in ids]
    return found


def gather_system(messages: list[Message]) -> list[Message]:
    """All system messages as one, the first."""
    system = [m["content"] for m in messages if m["role"] in ("system", "developer")]
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    first = next((m for m in messages if m["role"] in ("system", "developer")), None)
    return [first | {"content": join_text(*system)}, *rest] if first is not None else rest


def move_system(messages: list[Message]) -> list[Message]:
    """The system text in front of the first user message."""
    system = join_text(*(m["content"] for m in messages if m["role"] in ("system", "developer")))
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    if not system:
        return rest
    first = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": system}, *rest]
    return [*rest[:first], rest[first] | {"content": join_text(system, rest[first]["content"])}, *rest[first + 1 :]]


def join_repeats(messages: list[Message]) -> list[Message]:
    """Neighbours of one role as one message, unless they carry calls or results."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        plain = last is not None and not last.get("tool_calls") and message["role"] in ("user", "assistant", "system")
        if last is not None and plain and last["role"] == message["role"]:
            found[-1] = last | message | {"content": join_text(last["content"], message["content"])}
        else:
            found.append(message)
    return found


# What a template wants in other words


def add_thinking(message: Message, features: TemplateFeatures) -> Message:
    reasoning = message.get("reasoning_content")
    if not reasoning or not features.thinking:
        return message
    if features.thinking == "part":
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        return message | {"content": [{"type": "thinking", "thinking": reasoning}, *text]}
    if message.get("tool_calls") and message["content"]:  # gpt-oss has one place for both
        return message | {"thinking": join_text(reasoning, message["content"]), "content": ""}
    return message | {"thinking": reasoning}


def finish_call_message(message: Message, features: TemplateFeatures) -> Message:
    if "tool_call_id" in message and features.short_ids:
        message = message | {"tool_call_id": shorten_id(message["tool_call_id"])}
    if calls := message.get("tool_calls"):
        message = message | {"tool_calls": [finish_call(call, features) for call in calls]}
    return message


def finish_call(call: dict[str, Any], features: TemplateFeatures) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if features.call_arguments == "string":
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    elif not isinstance(arguments, dict):
        arguments = {"arguments": arguments}  # what the model wrote is no object
    id = shorten_id(call["id"]) if features.short_ids else call["id"]
    return call | {"id": id, "function": call["function"] | {"arguments": arguments}}


def shorten_id(id: str) -> str:
    """Nine letters and digits: as it is, or hashed."""
    if re.fullmatch("[A-Za-z0-9]{9}", id):
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def to_parts(message: Message) -> Message:
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
