"""Response formats that are hard to compile or to hold: deep, huge, recursive; and random changes of others."""

import copy
import random
from typing import Any

BASE_SCHEMAS: tuple[dict, ...] = (
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer", "minimum": 0}},
        "required": ["a"],
    },
    {"type": "array", "items": {"enum": ["x", "y", 1, None]}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/t"}},
        "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
    },
    {
        "anyOf": [
            {"type": "string", "pattern": "^[a-z]{2,5}$"},
            {"type": "number", "maximum": 9.5},
            {"const": {"k": [1]}},
        ]
    },
    {"type": "object", "patternProperties": {"^p_": {"type": "boolean"}}, "additionalProperties": False},
    {"allOf": [{"type": "object", "properties": {"d": {"type": "string", "format": "date"}}}, {"required": ["d"]}]},
)
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "type": ("string", "integer", ["null", "number"], "nonsense", 7),
    "minimum": (-1e308, 5, 10**30, "x"),
    "maximum": (3, -3, 0.1),
    "multipleOf": (0, 0.01, 7, -1),
    "minLength": (0, 3, 10**6, -1),
    "maxLength": (2, 0, 10**9),
    "pattern": ("(a*)*b", "[", "(?=x)", r"\1", "^.{1,2000}$", ""),
    "minItems": (0, 2, 10**5),
    "maxItems": (1, 0, 10**5),
    "uniqueItems": (True,),
    "contains": ({"type": "string"},),
    "required": (["a", "zz"], [], "a"),
    "additionalProperties": (True, False, {"type": "integer"}),
    "enum": ([], [1, "a", None, {"x": [1]}], list(range(500))),
    "const": (1, "a\nb", {"x": None}, []),
    "not": ({"type": "string"},),
    "if": ({"type": "string"},),
    "format": ("email", "nonsense", "date-time", "uuid"),
    "$ref": ("#", "#/nowhere", "http://example.com/x.json", "#/$defs/t"),
    "anyOf": ([], [{"type": "null"}, {}]),
    "oneOf": ([{"type": "string"}, {"minLength": 2}], [{"type": "string"}, {"type": "integer"}]),
    "allOf": ([], [{"minimum": 1}]),
    "minProperties": (1, 50),
    "propertyNames": ({"pattern": "^a"},),
    "dependentRequired": ({"a": ["b"]},),
    "description": ("é" * 50, "\u2028", "\x00"),
    "x-guidance": ({"lenient": True}, {"whitespace_pattern": "x"}),
}
PIECES = (
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "{1000}",
    "{2,1}",
    "{,}",
    "*",
    "+",
    "?",
    "|",
    "\\",
    "\\p{L}",
    "\\x",
    "\\u0041",
    "(?",
    "(?=",
    "^",
    "$",
    ".",
    "\x00",
    "é",
    "\n",
    " ",
    "/",
    '"',
    "::=",
    ":",
    "start",
    "root",
    "~3",
    "..",
    "%json {}",
    "%ignore /x/",
    "(a*)*",
    "(a|aa)+",
    "<[1]>",
    "<|end|>",
    "@x",
    "#",
    "//",
)

PATTERNS = [
    "(a+)+b",
    "(a*)*",
    "((a*)*)*c",
    "(x+x+)+y",
    "a{1000}",
    "a{100000}",
    "(a{100}){100}",
    "((a{50}){50}){50}",
    ".*" * 50,
    "(.|..|...|....)*x",
    "(a|b)*a(a|b){20}",
    "(a|b)*a(a|b){200}",
    "[^x]{0,5000}",
    "\\p{Greek}+",
    "(?=a)b",
    "(a)\\1",
    "(?<n>a)",
    "(",
    "*",
    "a{2,1}",
    "[z-a]",
    "\\",
    "",
    "^abc$",
    "(?i)abc",
    "\\bword\\b",
    "(" * 300 + "a" + ")" * 300,
    "a?" * 60 + "a" * 60,
    "|".join(f"word{i}" for i in range(20_000)),
    "\\d{1,9}(,\\d{3})*" * 8,
]
ODD_GRAMMARS = [
    "start: start",
    'start: start "a" | "a"',
    "start: a\na: b\nb: a",
    'start: "a"~1000000',
    "start: ",
    "",
    "start",
    "x: /a/",
    "start: /a/ undefined",
    'start: "a" | ',
    "root ::= root",
    'root ::= root "a" | "a"',
    'root ::= "a"{100000}',
    "root ::= ",
    "root ::= [",
    'start: ("a" | "a" "a")* "b"',
    'start: e\ne: e e | "a"',
    'start: e\ne: e "+" e | e "*" e | /[0-9]/',
    "start: " + " ".join(f'"w{i}"?' for i in range(3000)),
    "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2000)),
    "start: /(a*)*b/",
    'start: %json {"type": "nonsense"}',
    "start: <[999999]>",
    "start: <|nothing|>",
    "start: (((((((((((((((((((",
    'start: a a a a a a a a\na: b b b b b b b b\nb: c c c c c c c c\nc: "x"?',
    "\x00",
    "start: /[/",
]


def odd_schemas() -> list[Any]:
    schemas: list[Any] = []
    for depth in (20, 120, 500):
        nested: dict = {"type": "integer"}
        for _ in range(depth):
            nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
        schemas.append(nested)
        lists: Any = {"type": "integer"}
        for _ in range(depth):
            lists = {"type": "array", "items": lists}
        schemas.append(lists)
    schemas += [
        {"enum": [f"value {i}" for i in range(20_000)]},
        {"enum": [f"{i:06d}" for i in range(60_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
        {"type": "object", "properties": {f"p{i}": {"enum": [f"{i}-{j}" for j in range(40)]} for i in range(300)}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"allOf": [{"$ref": "#"}, {"type": "object"}]},
        {
            "$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}},
            "$ref": "#/$defs/n",
        },
        {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(30)], "type": "integer"},
        {"anyOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(500)]},
        {"type": "string", "minLength": 10**6},
        {"type": "string", "maxLength": 10**7},
        {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        {"type": "number", "multipleOf": 1e-9},
        {"type": "object", "minProperties": 5, "maxProperties": 3},
        {"type": "integer", "minimum": 5, "maximum": 3},
        False,
        True,
        {"type": "string", "format": "email", "pattern": "(x+x+)+y"},
        {"enum": []},
        {"type": []},
        {"const": {"a" * 5000: 1}},
    ]
    return schemas


def odd_formats() -> list[dict]:
    """Each is known to be hard."""
    made = [{"type": "json_schema", "schema": s} for s in odd_schemas()] + [
        {"type": "regex", "pattern": p} for p in PATTERNS
    ]
    made += [{"type": "grammar", "grammar": g} for g in ODD_GRAMMARS]
    choices = [
        [f"choice {i}" for i in range(50_000)],
        ["a" * 100_000],
        ["a" * i for i in range(1, 300)],
        ["\x00", "é", "\n", "|", "(["],
    ]
    return made + [{"type": "choice", "choices": c} for c in choices]


def mutate_schema(schema: Any, rng: random.Random) -> Any:
    """Keywords put in, taken out, exchanged, at random places."""
    schema = copy.deepcopy(schema)
    for _ in range(rng.randint(1, 4)):
        places: list[dict] = []
        collect_objects(schema, places)
        if not places:
            break
        place = rng.choice(places)
        if rng.random() < 0.25 and place:
            place.pop(rng.choice(list(place)))
        elif rng.random() < 0.15:
            place["anyOf"] = [copy.deepcopy(dict(place)), {"type": rng.choice(("string", "null"))}]
        else:
            keyword = rng.choice(list(KEYWORDS))
            place[keyword] = copy.deepcopy(rng.choice(KEYWORDS[keyword]))
    return schema


def collect_objects(value: Any, found: list[dict]) -> None:
    if isinstance(value, dict):
        found.append(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        collect_objects(inner, found)


def mutate_text(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(text))
        end = at + rng.choice((0, 0, 1, 3))
        text = text[:at] + rng.choice((*PIECES, "")) + text[end:]
    return text or "x"
