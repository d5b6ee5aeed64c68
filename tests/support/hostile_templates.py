"""Templates that try to run for ever or to fill the memory, and a child process that renders them under hard limits.

    python -m tests.support.hostile_templates [--work 3000000] [--memory 1024]

Prints what became of each, its CPU seconds and the process's peak memory. Exit code 1 when one was stopped by the
memory limit instead of the sandbox.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, too

BIG = "{% set x = 'abcdefgh' * 100000 %}"  # a text that the bound allows
DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
PAIRS = "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
PAIRS += "{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
LOOP = "{% for i in range(99999) %}"
COPIES = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}"
DEEP = "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = dict(a=ns.x)|items|first %}{% endfor %}"
SAME_HASH = "range(0, 99999 * 2305843009213693951, 2305843009213693951)"
HOSTILE = {
    "add": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "concat": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "add lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "multiply": "{{ 'a' * 10**10 }}",
    "multiply in steps": "{% set ns = namespace(x='a') %}{% for i in range(9) %}{% set ns.x = ns.x * 99 %}{% endfor %}",
    "numbers": "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "powers": "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x ** 9 %}{% endfor %}",
    "hexadecimal number": "{% set x = ('f' * 9000000)|int(base=16) %}{% for i in range(9) %}{{ x // 7 }}{% endfor %}",
    "round": "{{ 1.5|round(999999999, 'floor') }}",
    "slice": "{{ []|slice(10**10)|list|length }}",
    "slices of text": BIG + LOOP + "{% set y = x[1:] %}{% endfor %}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "tojson indent": "{{ [[[1]]]|tojson(indent=10**9) }}",
    "tojson nested": "{% set ns = namespace(x=[]) %}{% for i in range(190) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{% for i in range(9999) %}{{ ns.x|tojson(indent=9999) }}{% endfor %}",
    "tojson separators": "{{ range(9999)|list|tojson(separators=('x' * 1000000, ':')) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "center method": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "zfill": "{{ '1'.zfill(9999999999) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(10**9) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format filter": "{{ '%9999999999s'|format('x') }}",
    "format method": "{{ '{:>9999999999}'.format('x') }}",
    "format nested": "{{ '{:>{}}'.format('x', 9999999999) }}",
    "replace": BIG + "{{ x|replace('a', x) }}",
    "replace method": BIG + "{{ x.replace('', x) }}",
    "join": BIG + "{{ range(99999)|join(x) }}",
    "join method": BIG + "{{ x.join('abcdefgh' * 9999) }}",
    "join copies": BIG + "{{ ([x] * 99999)|join }}",
    "translate": BIG + "{{ 'aaaa'.translate({97: x}) }}{{ x.translate({97: x}) }}",
    "indent": "{{ ('a\n' * 100000)|indent(9999) }}",
    "wordwrap": "{{ ('a ' * 100000)|wordwrap(1, wrapstring='x' * 100000) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "printed copies": DOUBLED + "{{ ns.x }}",
    "string of copies": DOUBLED + "{{ ns.x|string|length }}",
    "concatenated copies": DOUBLED + "{{ ('' ~ ns.x)|length }}",
    "compared copies": PAIRS + "{{ ns.x == ns.y }}",
    "hashed copies": PAIRS + "{% set d = {ns.x: 1} %}{{ d[ns.y] }}",
    "sorted copies": PAIRS + "{{ [ns.x, ns.y]|sort|length }}",
    "namespaces": "{% set n = namespace(x=1) %}{% set ns = namespace(n=n) %}{% for i in range(60) %}"
    "{% set ns.n = namespace(a=ns.n, b=ns.n) %}{% endfor %}{{ ns.n }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
    "dicts": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}"
    "{{ ns.x }}",
    "default in a map": "{% set x = 'a' * 1000000 %}{{ ([nothing] * 99999)|map('default', x)|join }}",
    "select": LOOP + "{{ range(99999)|select('none')|list }}{% endfor %}",
    "reject in": LOOP + "{{ range(99999)|reject('in', range(99999)|list)|list }}{% endfor %}",
    "membership": BIG + LOOP + "{{ 'zzzz' in x }}{% endfor %}",
    "search": BIG + LOOP + "{{ x.find('zzzz') }}{{ x.count('zz') }}{% endfor %}",
    "literal text": "{% for i in range(99999) %}" + "lorem ipsum " * 8000 + "{% endfor %}",
    "long body": LOOP + "{% if a %}{% endif %}" * 4000 + "{% endfor %}",
    "macro text": "{% macro f() %}" + "lorem ipsum " * 8000 + "{% endmacro %}" + LOOP + "{% set y = f() %}{% endfor %}",
    "recursive loop": "{% for i in range(99999) recursive %}{% if loop.first and loop.depth < 900 %}"
    "{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "filtered loop": LOOP + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "spread": LOOP + "{% set y = dict.get(*range(99999)) %}{% endfor %}",
    "blocks": "{% block a %}" + "{{ self.a() }}" * 2 + "{% endblock %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "date": "{{ strftime_now('%9999999999Y') }}{{ strftime_now('%A' * 9000000) }}",
    "its own error": DOUBLED + "{{ raise_exception(ns.x) }}",
    "constant": "{{ ('a' * 99999)|center(99999999999)|upper }}",
    "source": "{{ a }}" * 99999,
    "upper": BIG + LOOP + "{% set y = x|upper %}{% endfor %}",
    "split": BIG + LOOP + "{% set y = x.split('a') %}{% endfor %}",
    "changed": PAIRS + "{% for i in [1, 2] %}{{ loop.changed(ns.x if i == 1 else ns.y) }}{% endfor %}",
    "sum": "{{ ([[1]] * 99999)|sum(start=[])|length }}",
    "unique": PAIRS + "{{ [ns.x, ns.y]|unique|list|length }}",
    "groupby": "{{ ([{'a': 1}] * 999999)|groupby('a')|length }}",
    "lazy chain": "{% set ns = namespace(x=[1]) %}"
    + LOOP
    + "{% set ns.x = ns.x|map('string') %}{% endfor %}"
    + LOOP
    + "{% set ns.x = ns.x|select %}{% endfor %}{{ ns.x|list }}",
    "format repeated": BIG + "{{ ('{0}' * 99999).format(x) }}",
    "percent repeated": BIG + "{{ ('%(a)s' * 99999) % {'a': x} }}",
    "percent hidden": "{{ '%%(a %99999999d)' % 1 }}{{ '%((a)b)99999999d' % {'(a)b': 1} }}",
    "many widths": "{{ ('%9999d' * 9999)|format(*range(9999)) }}",
    "refund": LOOP + "{{ (-9999999)|tick }}{{ ('nan'|float)|tick }}" + LOOP + "{% endfor %}{% endfor %}",
    "refund in a map": LOOP + "{{ [-9999999]|map('tick')|list }}" + LOOP + "{% endfor %}{% endfor %}",
    "search backwards": BIG + "{{ x.rfind('ab' ~ 'b' * 400000) }}{{ ('a' * 800000).rfind('ab' ~ 'a' * 400000) }}",
    "strip": "{{ ('a' * 900000).strip('b' * 500000 ~ 'a') }}",
    "one hash": "{{ " + SAME_HASH + "|unique|list|length }}{{ dict.fromkeys(" + SAME_HASH + ")|length }}",
    "lines": "{{ ('a\r' * 400000)|indent(9999) }}",
    "encoding": "{{ ('\u00e9' * 900000 ~ '\u00fc').encode('punycode') }}",
    "count in a range": LOOP + "{{ range(99999).count('x') }}{{ 'x' in range(99999) }}{% endfor %}",
    "keys": LOOP + "{{ {'a': 1}.keys() - range(99999) }}{% endfor %}",
    "copies in capitals": COPIES + "{{ ns.x|upper }}",
    "copies replaced": COPIES + "{{ 'a'|replace('a', ns.x) }}",
    "test of copies": COPIES + "{{ ns.x is lower }}",
    "deep key": DEEP + "{{ {}.get(ns.x) }}",
    "deep key of a cycler": DEEP + "{{ [cycler(ns.x)]|unique(attribute='current')|list }}",
    "wide characters": "{% set x = '\U0001f600' * 900000 %}" + LOOP + "{% set ns = [x ~ i] %}{% endfor %}",
    "characters": "{% set ns = namespace(x=[]) %}{% set x = '\U0001f600' * 900000 %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + [x|list] %}{% endfor %}",
    "parts": "{% set ns = namespace(x=[]) %}{% set x = 'b\U0001f600' * 400000 %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + [x.split('b')] %}{% endfor %}",
    "rows": "{% set ns = namespace(x=[]) %}"
    + LOOP
    + "{% set ns.x = ns.x + [range(99999)|batch(1)|list] %}{% endfor %}",
    "escapes": "{% set x = '\x00' * 900000 %}" + LOOP + "{% set y = [x]|string %}{% set z = [x]|tojson %}{% endfor %}",
    "escape": BIG + "{% autoescape true %}" + LOOP + "{{ ('<' * 99999) }}{% endfor %}{% endautoescape %}",
}


def render_all(work: int, megabytes: int) -> Iterator[dict]:
    """What became of every template, in this process, which can take no more memory than this from now on."""
    from mlxrt.errors import BadTemplate
    from mlxrt.text import chat_template, template_sandbox

    template_sandbox.MAX_WORK = work
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)
    for name, source in HOSTILE.items():
        began = time.process_time()
        try:
            text = chat_template.ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}], {}, True)
            result = f"rendered {len(text)} characters"
        except BadTemplate as error:
            result = str(error)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        yield {"name": name, "result": result, "seconds": time.process_time() - began, "peak_mb": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=int, default=3_000_000)
    parser.add_argument("--memory", type=int, default=1024, help="megabytes")
    asked, failed = parser.parse_args(), 0
    for row in render_all(asked.work, asked.memory):
        failed += "memory" in row["result"]
        print(f"{row['seconds']:6.2f} s {row['peak_mb']:5} MB  {row['name']:22} {row['result'][:110]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
