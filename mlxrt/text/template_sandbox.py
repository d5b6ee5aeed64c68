"""Jinja for chat templates, with a bound on work and memory that holds whatever a template does.

A template is untrusted code. Three rules bound it:

- Rendering has a budget of units. A pass through a loop or a macro costs what its body holds, a call 20, and every
  value that is made, printed, compared or joined its size: 8 characters or two items a unit, 1,024 characters that are
  only read. What can make much out of little (products, padding, formats, joins, replacements) spends before it does.
- One text has at most a million characters, besides what the messages bring, and one number 1,024 bits. So whatever
  else makes text out of text (escapes, cases, JSON) makes little, and may spend afterwards.
- Nothing lazy is kept: iterators are run through when they are made, or a chain of them would overflow the stack.

Containers count as often as they are nested: a list that holds another one twice is as long as its text.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, Undefined, nodes, pass_context
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

MAX_WORK = 3_000_000  # units of one rendering, besides those that the input earns: seconds
MAX_SOURCE = 100_000  # characters of a template; the longest published ones have 30,000
MAX_INPUT = 100_000_000  # units that messages and tools may have
MAX_TEXT = 1_000_000  # characters of one text, besides those of the input
MAX_BITS = 1_024  # of an integer
MAX_WIDTH = 10_000  # a template may pad a text to
MAX_DEPTH = 200  # containers inside each other
CALL_COST = 20  # units of a call
ITEM_COST = 2  # of an item that is made
TEXT, READ = 3, 10  # a unit is 2**3 characters that are made, 2**10 that are only read
EARNED = 64  # units that a unit of the input earns

REMOVED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr", "filesizeformat")
REMOVED_METHODS = ("translate", "encode", "to_bytes")
UNTOUCHED = frozenset("attr count d default length tojson".split())  # filters that look at nothing, or spend themselves
ITEMS = frozenset("batch first items join last list reverse slice".split())  # that take items as they are
EACH = frozenset("map reject rejectattr select selectattr".split())  # that call something for each item
DEEP = frozenset("dictsort groupby max min sort sum unique".split())  # that compare; all others make text of a value
PERCENT = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?.", re.DOTALL)
NESTED_KEY = re.compile(r"%\([^()]*\(")

_work: ContextVar["Work"] = ContextVar("work")


class Work:
    """What is left of a rendering's budget."""

    def __init__(self, units: int, longest: int):
        self.units = self.left = units
        self.longest = longest


@contextmanager
def limit_work(units: int, longest: int = MAX_TEXT) -> Iterator[Work]:
    token = _work.set(Work(units, longest))
    try:
        yield _work.get()
    finally:
        _work.reset(token)


@contextmanager
def limit_rendering(variables: Mapping[str, Any], base: int) -> Iterator[Work]:
    """The budget of a rendering with these variables, which earn their share of it."""
    with limit_work(MAX_INPUT) as work:
        weigh(variables)
    units = MAX_INPUT - work.left
    with limit_work(base + units * EARNED, MAX_TEXT + 4 * (units << TEXT)) as work:
        yield work


def spend(units: int) -> None:
    work = _work.get()
    work.left -= units
    if work.left < 0:
        raise TemplateRuntimeError(
            f"it runs too long, or makes too much text (a budget of {work.units:,} units is spent)"
        )


def check_text(characters: int) -> None:
    longest = _work.get().longest
    if characters > longest:
        raise TemplateRuntimeError(f"it makes too much text at once (more than {longest:,} characters)")


def make_text(characters: int) -> None:
    """Spend the size of a text before it is made."""
    check_text(characters)
    spend(1 + (characters >> TEXT))


def weigh(value: Any, depth: int = 0, shift: int = TEXT) -> int:
    """Spend the size of a value with all that it holds; how deeply it is nested."""
    kind = type(value)
    if kind is str:
        spend(1 + (len(value) >> shift))
        return depth
    if kind is dict or kind is list or kind is tuple:
        spend(1 + len(value))
        if depth >= MAX_DEPTH:
            raise TemplateRuntimeError(f"more than {MAX_DEPTH} lists or dicts inside each other")
        deepest, depth = depth, depth + 1
        for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            if type(inner) is str:
                _work.get().left -= 1 + (len(inner) >> shift)  # the next `spend` looks whether anything is left
            elif (found := weigh(inner, depth, shift)) > deepest:
                deepest = found
        spend(0)
        return deepest
    return weigh_other(value, depth, shift)


def weigh_other(value: Any, depth: int, shift: int) -> int:
    """Numbers, and what is seldom in a template."""
    if value is None or isinstance(value, (bool, float)):
        spend(1)
    elif isinstance(value, int):
        spend(1 + (value.bit_length() >> TEXT))
    elif isinstance(value, range):
        spend(1 + (len(value) >> 4))
    elif isinstance(value, (str, bytes)):
        spend(1 + (len(value) >> shift))
    elif isinstance(value, Mapping):
        return weigh(dict(value), depth, shift)
    elif isinstance(value, Sized) and isinstance(value, Iterable):
        return weigh(list(value), depth, shift)
    elif type(value).__module__.startswith("jinja2") and not isinstance(value, Undefined):
        raise TemplateRuntimeError(f"a {type(value).__name__} can be neither printed nor compared nor listed")
    else:
        spend(1)
    return depth


def measure(value: Any) -> Any:
    """Spend the size of a value that is put into a container."""
    weigh(value)
    return value


def measure_text(value: Any) -> int:
    """Spend the size of a value that becomes text; its characters, about."""
    if type(value) is str:
        make_text(len(value))
        return len(value)
    before = _work.get().left
    weigh(value)
    check_text(size := before - _work.get().left << TEXT)
    return size


def print_value(value: Any) -> Any:
    measure_text(value)
    return value


def charge(value: Any) -> Any:
    """Spend the size of a new value; what a list holds exists already."""
    if isinstance(value, (str, bytes)):
        make_text(len(value))
    elif isinstance(value, (list, tuple, dict)):
        spend(len(value) * ITEM_COST)
    elif isinstance(value, int):
        check_bits(value.bit_length())
    elif isinstance(value, Iterator):
        return iter(list(counted(value, ITEM_COST)))  # true and without a length, as the lazy one is
    return value


def counted(items: Iterable, cost: int = 1) -> Iterator:
    for item in items:
        spend(cost)
        yield item


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateRuntimeError(f"a number of more than {MAX_BITS:,} bits")


def check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateRuntimeError(f"a width of more than {MAX_WIDTH:,}")


# Operators


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Spend the size of a result before it is computed."""
    numbers = isinstance(left, int), isinstance(right, int)
    if all(numbers):
        a, b = left.bit_length(), right.bit_length()
        check_bits(a * max(right, 0) if operator == "**" else a + b if operator == "*" else max(a, b))
    elif operator == "*" and any(numbers):
        items, times = (right, left) if numbers[0] else (left, right)
        if isinstance(items, (str, bytes)):
            make_text(len(items) * max(times, 0))
        elif isinstance(items, Sized):
            spend((len(items) + 1) * max(times, 0))
    elif operator == "%" and isinstance(left, str):
        charge_percent(left, right)
    elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        spend(1 + (len(left) + len(right) >> 1))
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        make_text(len(left) + len(right))
    else:
        weigh((left, right))


def charge_percent(pattern: str, values: Any) -> None:
    check_text(len(pattern))
    if NESTED_KEY.search(pattern):
        raise TemplateRuntimeError("a format with parentheses in a name")
    fields = PERCENT.findall(pattern)
    charge_fields(pattern, [number for field in fields for number in field if number], len(fields), values)


def charge_format(pattern: str, *values: Any) -> None:
    check_text(len(pattern))
    specs = [spec for _, name, spec, _ in Formatter().parse(pattern) if name is not None]
    numbers = [found for spec in specs for found in re.findall(r"[{]|\d+", spec or "")]
    charge_fields(pattern, numbers, len(specs), values)


def charge_fields(pattern: str, widths: list[str], fields: int, values: Any) -> None:
    """A format makes at most all values in each of its fields, and what its widths add."""
    if not all(width.isdecimal() and len(width) < 9 for width in widths):
        raise TemplateRuntimeError("a format with a width that is an argument, or of more than 8 digits")
    make_text(len(pattern) + fields * measure_text(values) + sum(map(int, widths)))


# Methods


def charge_call(function: Any, args: tuple, kwargs: dict) -> tuple:
    """Spend what a call costs before it is made; the arguments to make it with."""
    spend(CALL_COST + len(args) + len(kwargs))
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, (str, int)) and name in REMOVED_METHODS:
        raise TemplateRuntimeError(f"{name} is not available in chat templates")
    if isinstance(owner, str):
        check_text(len(owner))
        spend(len(owner) >> READ)
        return charge_text_method(owner, name, args, kwargs)
    if isinstance(owner, (list, tuple, range)):
        weigh(owner, shift=READ)
    if isinstance(owner, dict) or owner is dict or method is dict or name == "changed":
        weigh(args, shift=READ)
    return args


def charge_text_method(owner: str, name: str, args: tuple, kwargs: dict) -> tuple:
    first = args[0] if args else None
    if name == "replace":
        charge_replace(owner, *args[:2])
    elif name in ("center", "ljust", "rjust", "zfill"):
        check_width(first)
    elif name == "expandtabs":
        size = kwargs.get("tabsize", 8) if first is None else first
        make_text(len(owner) * max(size, 1))
    elif name in ("format", "format_map"):
        charge_format(owner, args, kwargs)
    elif name == "join" and args:
        return (charge_join(first, owner), *args[1:])
    elif name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit") and isinstance(first, str):
        spend(len(owner) * len(first) >> READ)  # these compare everything with everything
    if name in ("split", "rsplit", "splitlines"):
        separator = kwargs.get("sep", first)
        spend(ITEM_COST * (owner.count(separator) if separator and isinstance(separator, str) else len(owner) // 2))
    return args


def charge_replace(text: str, old: Any = None, new: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        make_text(len(text) + text.count(old) * len(new))


def charge_join(items: Any, separator: Any) -> list:
    found = list(counted(items))
    make_text(sum(map(measure_text, found)) + len(found) * measure_text(separator))
    return found


# Filters and tests


def limit_filter(name: str, function: Callable) -> Callable:
    """A filter that spends what it costs."""
    at = int(hasattr(function, "jinja_pass_arg"))  # the first argument is the context, or the value

    @wraps(function)
    def limited(*args, **kwargs):
        value = args[at]
        if name in ITEMS or name in EACH:
            cost = ITEM_COST if name in ITEMS else 2 * ITEM_COST
            if isinstance(value, Iterator):
                value = counted(value, cost)
            elif isinstance(value, Sized):
                spend(1 + len(value) * cost)
        elif name in DEEP:
            weigh((args[at:], kwargs))
        elif name not in UNTOUCHED:
            for given in (*args[at:], *kwargs.values()):
                measure_text(given)
        if (prepare := PREPARE.get(name)) is not None:
            value = prepare(value, *args[at + 1 :], **kwargs)
        return charge(function(*args[:at], value, *args[at + 1 :], **kwargs))

    return limited


def prepare_width(value, width=0, *_, **__):
    check_width(width)
    return value


def prepare_indent(value, width=4, *_, **__):
    check_width(width)
    make_text(len(str(value).splitlines()) * (len(width) if isinstance(width, str) else abs(width)))
    return value


def prepare_replace(value, old=None, new=None, *_, **__):
    charge_replace(str(value), str(old), str(new))
    return value


def prepare_trim(value, chars=None):
    spend(len(str(value)) * len(chars or "") >> READ)
    return value


def prepare_sum(value, attribute=None, start=0):
    if not isinstance(start, (int, float)):
        raise TemplateRuntimeError("sum adds numbers only")
    return value


def prepare_join(value, d="", *_, **__):
    return charge_join(value, d)


def prepare_format(value, *args, **kwargs):
    charge_percent(str(value), kwargs or args)
    return value


PREPARE: dict[str, Callable] = {
    "batch": prepare_width,
    "center": prepare_width,
    "format": prepare_format,
    "indent": prepare_indent,
    "join": prepare_join,
    "replace": prepare_replace,
    "round": prepare_width,
    "slice": prepare_width,
    "sum": prepare_sum,
    "trim": prepare_trim,
}


def limit_test(name: str, function: Callable) -> Callable:
    at = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def limited(*args):
        spend(1)
        if name in ("lower", "upper"):
            measure_text(args[at])
        elif len(args) > at + 1:  # a comparison: the other tests look at the type
            weigh(args[at:], shift=READ)
        return function(*args)

    return limited


def tojson(x: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes for HTML."""
    before = _work.get().left
    depth = weigh(x)
    size = before - _work.get().left
    each = (len(indent) if isinstance(indent, str) else max(indent or 0, 0)) * depth + len("".join(separators or ()))
    make_text((size << TEXT) + size * each)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read(value: Any) -> Any:
    """A value that is compared."""
    weigh(value, shift=READ)
    return value


def search(value: Any) -> Any:
    """A value that something is looked for in."""
    if isinstance(value, dict):
        spend(1)
    else:
        weigh(value, shift=READ)
    return value


@pass_context  # or it would be computed once, when the template is compiled
def tick(context, cost: int) -> str:
    spend(abs(int(cost)))  # a template can call it, too
    return ""


@pass_context
def count_items(context, items: Iterable, cost: int) -> Iterator:
    return counted(items, abs(int(cost)))


def raise_exception(message: object) -> None:
    raise TemplateError(str(print_value(message)))


def limited_range(*args) -> range:
    for number in args:
        if isinstance(number, int) and number.bit_length() > 60:  # from there on different numbers have one hash
            raise OverflowError("range of too large numbers")
    return safe_range(*args)


# Compiling


class Metering(NodeTransformer):
    """Adds the spending to a template's syntax tree, where Jinja has no hook for it."""

    def visit_For(self, node):
        if node.test is not None:
            node.iter = apply_filter(node.iter, "count_items", nodes.Const(static_cost([node.test])))
        return self._meter_body(node)

    def _meter_body(self, node):
        cost = static_cost(node.body)
        node = self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(apply_filter(nodes.Const(cost), "tick"), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = _meter_body

    def visit_Concat(self, node):
        node = self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.Const) else apply_filter(n, "print_value") for n in node.nodes]
        return node

    def visit_Compare(self, node):
        node = self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        searches = [operand.op in ("in", "notin") for operand in node.ops]
        if not any(searches) and any(isinstance(side, nodes.Const) for side in sides):
            return node  # a comparison with a constant ends where the constant does
        node.expr = meter_operand(node.expr, "read")
        for operand, searched in zip(node.ops, searches, strict=True):
            operand.expr = meter_operand(operand.expr, "search" if searched else "read")
        return node

    def visit_Getitem(self, node):
        node = self.generic_visit(node)
        return apply_filter(node, "charge") if isinstance(node.arg, nodes.Slice) else node

    def _meter_container(self, node):
        node = self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"
        return node if stored or is_constant(node) else apply_filter(node, "measure")

    visit_List = visit_Tuple = visit_Dict = _meter_container


def apply_filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def meter_operand(node: nodes.Expr, name: str) -> nodes.Expr:
    return node if is_constant(node) else apply_filter(node, name)


def is_constant(node: nodes.Node) -> bool:
    literals = (nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)
    return isinstance(node, literals) and all(is_constant(child) for child in node.iter_child_nodes())


def static_cost(body: Iterable[nodes.Node]) -> int:
    """Units of running through a body once: its nodes and its literal text."""
    count = characters = 0
    stack = list(body)
    while stack:
        node = stack.pop()
        count += 1
        characters += len(node.data) if isinstance(node, nodes.TemplateData) else 0
        stack.extend(node.iter_child_nodes())
    return 1 + count // 4 + (characters >> TEXT)


class Generation(Extension):
    """{% generation %} marks the assistant's text for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a class attribute

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates expect, in which everything spends."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self):
        extensions = [Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=print_value)
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=raise_exception, range=limited_range)
        self.filters["tojson"] = tojson
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: limit_filter(name, f) for name, f in self.filters.items()}
        for own in (tick, count_items, measure, print_value, read, search, charge):
            self.filters[own.__name__] = own
        self.tests = {name: limit_test(name, f) for name, f in self.tests.items()}  # type: ignore[arg-type]

    def call(self, context, obj, *args, **kwargs):
        args = charge_call(obj, args, kwargs)
        return charge(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context, operator, left, right):
        charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj, argument):
        if isinstance(argument, tuple):
            weigh(argument)  # a key
        return super().getitem(obj, argument)

    def _parse(self, source, name, filename):
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"it has {len(source):,} characters; at most {MAX_SOURCE:,} are read")
        tree = Metering().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree
