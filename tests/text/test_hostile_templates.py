"""Templates that try to run for ever or to fill the memory are refused, or rendered within the bound."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlxrt.errors import BadTemplate
from mlxrt.text.chat_template import ChatTemplate
from tests.support.hostile_templates import HOSTILE

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "hi"}]


def test_hostile_templates_end_within_the_bound():
    """In a child with a hard limit on memory: with a small budget all of them end at once; `timeout` is for a hang."""
    command = [sys.executable, "-m", "tests.support.hostile_templates", "--work", "60000", "--memory", "400"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    rows = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr or ran.stdout
    assert len(rows) == len(HOSTILE) >= 60
    assert not [row for row in rows if "rendered" in row]


def render(template: str, messages=MESSAGES) -> str:
    return ChatTemplate(template, {}).render(messages, {}, True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a'.center(5) }}|{{ 'ab' | center(6) }}", "  a  |  ab  "),
        ("{{ '%-5s|%03d' % ('a', 7) }}{{ '{:>4}'.format('x') }}{{ '%s'|format('y') }}", "a    |007   xy"),
        (
            "{{ 'a\tb'.expandtabs(4) }}{{ 'aXbX'.replace('X', 'long') }}{{ 'aXb'|replace('X', '') }}",
            "a   balongblongab",
        ),
        ("{{ ['a', 'b']|join(', ') }}{{ '-'.join(['c', 'd']) }}{{ [1, 2]|join }}", "a, bc-d12"),
        ("{{ 'a\nb'|indent(2) }}{{ [3, 1, 2]|sort }}{{ [1, 1, 2]|unique|list }}", "a\n  b[1, 2, 3][1, 2]"),
        ("{{ [1, 2, 3]|batch(2)|list }}{{ 7 // 2 }}{{ 2 ** 100 }}", "[[1, 2], [3]]31267650600228229401496703205376"),
        ("{{ {'b': 1, 'a': [2]}|tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% for i in range(3) if i != 1 %}{{ loop.index }}{{ i }}{% endfor %}{{ 'abc'[1:] }}", "1022bc"),
        ("{{ 'b' in 'abc' }}{{ [1, 2] == [1, 2] }}{{ {'a': 1} ~ (1, 2) }}", "TrueTrue{'a': 1}(1, 2)"),
        ("{% autoescape true %}{{ '<' ~ ['<'] }}{% endautoescape %}{{ ('<'|e) ~ '>' }}", "&lt;[&#39;&lt;&#39;]&lt;>"),
    ],
)
def test_what_templates_do_is_as_without_the_bound(template, text):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    found = render(template)
    assert found == text
    if "tojson" not in template:  # Jinja's own escapes for HTML
        assert (
            ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template).render() == found
        )


def test_long_conversations_earn_their_work():
    """The budget grows with the messages: what a template does with each of them is not refused for their number."""
    messages = [{"role": "user", "content": "word " * 2000}] * 3000  # 30 million characters
    template = "{% for m in messages %}{% set c = m.content.strip() ~ '\n' %}{{ m.role }}: {{ c }}{% endfor %}"
    assert len(render(template, messages)) == 3000 * len("user: " + "word " * 2000)


def test_messages_that_hold_themselves_are_refused():
    message = {"role": "user", "content": "x"}
    message["self"] = [message]
    with pytest.raises(BadTemplate, match="inside each other"):
        render("{{ messages }}", [message])
