"""Chat templates against transformers rendering the same, and templates that misbehave."""

from datetime import datetime

import pytest
from pytest import raises

from mlxrt.errors import BadRequest, BadTemplate
from mlxrt.text import Tokenizer, template_sandbox
from mlxrt.text.chat_template import ChatTemplate

CHAT = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Größe? 'quotes' \"double\""},
    {
        "role": "assistant",
        "content": "ok",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, None]}}}],
    },
    {"role": "user", "content": [{"type": "text", "text": "parts"}]},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<b>é</b>", "parameters": {"b": 1, "a": [True]}}}
]

TEMPLATES = {
    "loop": "{% for m in messages %}{{ loop.length }}{{ m['role'] }}{{ ', ' if not loop.last }}{% endfor %}",
    "trim": "{% for m in messages %}\n    {% if loop.first %}\n  first\n    {% endif %}\n  x\n{% endfor %}\n",
    "tojson": "{{ tools | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=True, sort_keys=True) }}",
    "separators": "{{ tools | tojson(separators=(',', ':')) }}",
    "names": "{{ bos_token }}[{{ eos_token }}][{{ pad_token }}][{{ documents }}]",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{% endfor %}",
    "break": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% continue %}no{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "thinking": "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}",
    "prompt": "{% if add_generation_prompt %}<assistant>{% endif %}",
    "tools": "{% if tools %}{{ tools[0].function.name }}{{ tools[0].function.parameters.items() | list }}{% endif %}",
    "filters": "{{ messages | map(attribute='role') | join('-') }}{{ messages[0].content.split('&') | first | trim }}",
    "recursive": "{% for m in [[1, [2, 3]], [4]] recursive %}({{ loop(m) if m is iterable else m }}){% endfor %}",
    "undefined": "[{{ nothing }}][{{ messages[0].nothing }}]{% for x in nothing %}{% endfor %}",
    "parts": "{% for p in messages[3].content %}{{ p.text }}{% endfor %}{{ messages[0].content is string }}",
    "multiply": "{{ '=' * 8 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ '%s %s' % (1, 2) }}",
}


def made(bpe, make_folder, template):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return make_folder(bpe, tokenizer_config_json=config | {"chat_template": template})


@pytest.mark.parametrize("name", TEMPLATES)
def test_against_transformers(name, bpe, make_folder):
    from transformers import AutoTokenizer

    folder = made(bpe, make_folder, TEMPLATES[name])
    truth = AutoTokenizer.from_pretrained(str(folder))
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for tools in (None, TOOLS):
        for prompt in (True, False):
            for thinking in (None, True, False):
                extra = {} if thinking is None else {"enable_thinking": thinking}
                wanted = truth.apply_chat_template(
                    CHAT, tools=tools, tokenize=False, add_generation_prompt=prompt, **extra
                )
                assert ours.render(CHAT, {"tools": tools} | extra, prompt) == wanted


def test_the_date(bpe, make_folder):
    tok = Tokenizer.from_folder(made(bpe, make_folder, "{{ strftime_now('%Y') }}"))
    assert int(tok.render(CHAT)) in {datetime.now().year, datetime.now().year - 1}


HOSTILE = {
    "its own refusal": ("{{ raise_exception('only user\n  and assistant') }}", "only user and assistant"),
    "syntax": ("{% if %}", "cannot be read"),
    "unknown filter": ("{{ 1 | nothere }}", "nothere"),
    "unknown tag": ("{% nothere %}", "nothere"),
    "attribute of nothing": ("{{ a.b.c }}", "undefined"),
    "bad type": ("{{ 'a' + 1 }}", "TypeError"),
    "by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "missing item": ("{{ {}['x']['y'] }}", "no attribute"),
    "escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined|not safely"),
    "change of messages": ("{{ messages.append(1) }}", "unsafe|not safely"),
    "long range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "nested loops": ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "runs too long"),
    "calls": ("{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "runs too long"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deep"),
    "long text": ("{{ 'a' * 10**9 }}", "makes too much text"),
    "long list": ("{{ 10**9 * [1] }}", "makes too much text"),
    "long number": ("{{ 10 ** (10 ** 9) }}", "number of more"),
    "deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read"),
    "not for JSON": ("{{ messages | tojson(indent=x.y) }}", "undefined"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_goes_wrong_is_one_line(name, bpe, make_folder, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_WORK", 100_000)  # or it takes seconds
    template, message = HOSTILE[name]
    with raises(BadTemplate, match=message) as caught:
        Tokenizer.from_folder(made(bpe, make_folder, template)).render(CHAT)
    assert "\n" not in str(caught.value)


def test_no_template(bpe, make_folder):
    tok = Tokenizer.from_folder(make_folder(bpe))
    assert not tok.has_template
    with raises(BadTemplate, match="no chat template; give raw text"):
        tok.render(CHAT)


def test_no_default_template(bpe, make_folder):
    tok = Tokenizer.from_folder(made(bpe, make_folder, [{"name": "tool_use", "template": "t"}]))
    assert tok.render(CHAT, tools=TOOLS) == "t"
    with raises(BadTemplate, match="named default; there are tool_use"):
        tok.render(CHAT)


@pytest.mark.parametrize(
    "messages", ["hi", {"role": "user"}, 3, None, ["hi"], [{"content": "x"}], [{"role": 3}], [{"role": None}], [[]]]
)
def test_bad_messages(bpe, make_folder, messages):
    with raises(BadRequest, match="message"):
        Tokenizer.from_folder(made(bpe, make_folder, "x")).render(messages)


@pytest.mark.parametrize("tools", ["f", {"a": 1}, 3, [f"{1}"]])
def test_bad_tools(bpe, make_folder, tools):
    with raises(BadRequest, match="tool"):
        Tokenizer.from_folder(made(bpe, make_folder, "x")).render(CHAT, tools=tools)


def test_the_messages_are_not_changed(bpe, make_folder):
    tok = Tokenizer.from_folder(made(bpe, make_folder, "{% for m in messages %}{% set m = {} %}{% endfor %}"))
    before = repr(CHAT)
    tok.render(CHAT)
    assert repr(CHAT) == before
