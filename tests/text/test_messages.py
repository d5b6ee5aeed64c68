"""Every form of messages that clients send, in templates that take some of them."""

import json

import pytest

from mlxrt.errors import BadRequest, UnsupportedContent
from mlxrt.text import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > messages | map(attribute='role') | list | length - 3 %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{{ '\n' }}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # as Gemma 2: no system, user and assistant in turn, nothing of tools
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{{ '\n' }}{% endfor %}[assistant]"
)
MISTRAL = (  # ids of nine characters, the system message first or not at all
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c.id }} {{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    " for {{ m.tool_call_id }}{% endif %}{{ '\n' }}{% endfor %}{{ tools | tojson if tools else '' }}[assistant]"
)
ONE_CALL = (  # as Llama 3: a message has one call
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one') }}{% endif %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{{ '\n' }}{% endfor %}{{ tools | tojson if tools else '' }}[assistant]"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{{ '\n' }}{% endfor %}"
    "[assistant]"
)
HARMONY = (  # thinking in a field of its own, not together with content
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}{{ m.thinking or '' }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{{ tools | tojson if tools else '' }}[assistant]"
)
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]


def call(id, arguments, name="f"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="module")
def make(bpe, tmp_path_factory):
    def make(template: str) -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        bpe.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.from_folder(folder)

    return make


@pytest.mark.parametrize("arguments", ['{"x": 3}', {"x": 3}], ids=["text", "object"])
@pytest.mark.parametrize("template", [CHATML, MISTRAL, ONE_CALL, HARMONY], ids=["chatml", "mistral", "one", "harmony"])
def test_arguments_are_rendered_as_an_object(make, template, arguments):
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call("a", arguments)]}]
    text = make(template).render([*messages, {"role": "tool", "tool_call_id": "a", "content": "9"}], tools=TOOLS)
    assert '{"x": 3}' in text and "\\" not in text and "None" not in text.replace("tools", "")


@pytest.mark.parametrize("arguments", ["", "null", None])
def test_no_arguments(make, arguments):
    text = make(CHATML).render([USER, {"role": "assistant", "tool_calls": [call("a", arguments)]}], tools=TOOLS)
    assert '"arguments": {}' in text


def test_contents_of_any_form(make):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for template in (CHATML, PARTS):
        text = make(template).render([{"role": "user", "content": parts}, {"role": "assistant"}, USER])
        assert "ab" in text and "type" not in text and "None" not in text


def test_parts_that_are_no_text_are_named(make):
    tokenizer = make(CHATML)
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": "new"}, 3):
        with pytest.raises(UnsupportedContent, match=r"message 0.*text can be read"):
            tokenizer.render([{"role": "user", "content": [part]}])
    with pytest.raises(UnsupportedContent, match="images"):
        tokenizer.render([USER | {"images": ["x"]}])
    for bad in ({"role": "alien", "content": "x"}, {"role": "user", "content": object()}):
        with pytest.raises(BadRequest, match="message 0"):
            tokenizer.render([bad])


def test_strict_templates_get_turns(make):
    tokenizer = make(STRICT)
    text = tokenizer.render([{"role": "system", "content": "S"}, USER, USER | {"content": "there"}])
    assert text == "[user]S\n\nhi\n\nthere\n[assistant]"
    late = [USER, {"role": "assistant", "content": "yes"}, {"role": "developer", "content": "D"}, USER]
    assert tokenizer.render(late) == "[user]D\n\nhi\n[assistant]yes\n[user]hi\n[assistant]"


def test_late_system_messages_join_the_first(make):
    late = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "y"},
            {"role": "system", "content": "L"}, USER]  # fmt: skip
    assert make(MISTRAL).render(late) == "[system]S\n\nL\n[user]hi\n[assistant]y\n[user]hi\n[assistant]"
    assert "<|im_start|>system\nL" in make(CHATML).render(late)  # this template takes them where they are


def test_ids_are_shortened_both_ways(make):
    messages = [USER, {"role": "assistant", "tool_calls": [call("call_abc-1", {}), call("ninechars", {})]}]
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("ninechars", "call_abc-1")]
    text = make(MISTRAL).render([*messages, *results], tools=TOOLS)
    first = text.partition("[assistant]")[2][:9]
    assert first.isalnum() and f"[tool]call_abc-1 for {first}\n" in text and "[tool]ninechars for ninechars\n" in text


def test_results_without_ids_belong_to_the_calls_in_order(make):
    messages = [USER, {"role": "assistant", "tool_calls": [call("", {"x": 1}), call("", {"x": 2})]}]
    text = make(ONE_CALL).render(
        [*messages, {"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"}], tools=TOOLS
    )
    order = [text.index(word) for word in ('"x": 1', "[tool]r1", '"x": 2', "[tool]r2")]
    assert order == sorted(order)


def test_a_template_without_tools_is_told_hermes_form(make, caplog):
    tokenizer = make(STRICT)
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call("a", '{"x": 3}')]},
                {"role": "tool", "tool_call_id": "a", "content": "9"}]  # fmt: skip
    with caplog.at_level("INFO", "mlxrt"):
        text = tokenizer.render(messages, tools=TOOLS)
        tokenizer.render(messages, tools=TOOLS)
    assert text.startswith("[user]# Tools") and '"name": "f"' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>' in text
    assert "[user]<tool_response>\n9\n</tool_response>" in text
    assert sum("takes no tools" in record.getMessage() for record in caplog.records) == 1


def test_reasoning_goes_where_the_template_wants_it(make):
    for message in (
        {"content": "A", "reasoning_content": "R"},
        {"content": "A", "reasoning": "R"},
        {"content": [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "A"}]},
        {"content": "<think>\nR\n</think>\n\nA"},
    ):
        messages = [USER, {"role": "assistant", **message}]
        assert "[assistant]R|A\n" in make(HARMONY).render(messages)
        assert "<think>R</think>A<|im_end|>" in make(CHATML).render(messages)
    calls = [USER, {"role": "assistant", "content": "A", "reasoning_content": "R", "tool_calls": [call("a", {})]}]
    assert "[assistant]R\n\nA|f {}" in make(HARMONY).render(calls, tools=TOOLS)


def test_template_options_reach_the_template(make):
    tokenizer = make("{{ messages[0].content }} {{ reasoning_effort }} {{ documents }} {{ date_string }}")
    options = {"reasoning_effort": "high", "documents": [1], "date_string": "today"}
    assert tokenizer.render([USER], template_options=options) == "hi high [1] today"
    with pytest.raises(BadRequest, match="messages"):
        tokenizer.render([USER], template_options={"messages": []})


def test_template_options_without_effect_are_told_once(make, caplog):
    tokenizer = make("{{ messages[0].content }}{{ effort }}")
    with caplog.at_level("WARNING", "mlxrt"):
        for _ in range(2):
            assert tokenizer.render([USER], template_options={"effort": 1, "eff": 2, "a\nb": 3}) == "hi1"
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"template option {name!r} has no effect: the chat template does not read it" for name in ("eff", "a\nb")
    ]
    with caplog.at_level("WARNING", "mlxrt"):
        tokenizer.render([USER], template_options={f"x{i}": i for i in range(100)})
    assert len(caplog.records) == 32
