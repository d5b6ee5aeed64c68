"""The shape of the source: who may import whom, how long things may get, what no file may hold.

Each rule is a function from a tree to its violations, so that it is tried on a planted fault as well as on the package.
"""

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from .support.source_tree import Module, Tree

pytestmark = pytest.mark.xdist_group("source")  # one worker parses the source, see test_names
ROOT = Path(__file__).resolve().parents[1]

# Which folder may import which, lower ones first: a line names only folders above it.
LAYERS = {
    "errors": "",
    "_openblas": "",
    "_interrupt": "",
    "config": "errors",
    "cache": "errors",
    "text": "errors",
    "kernels": "errors cache",
    "cache.memory": "errors kernels cache",
    "models": "errors kernels cache cache.memory",
    "weights": "errors cache text kernels models",
    "cache.storage": "errors cache cache.memory weights",
    "engine": "errors _openblas config cache text kernels cache.memory models weights cache.storage",
    "bench": "errors config _openblas cache kernels cache.memory text models weights engine",
    "server": "errors config cache text weights engine",
    "cli": "errors config _openblas _interrupt kernels cache.memory text models weights cache.storage "
    "engine bench server",
    "__main__": "cli",
}
PUBLIC_NAMES = (
    "mlxrt"  # the package's __init__: only _openblas and _interrupt at once, everything else by name when asked for
)

NEVER = ("torch", "transformers", "mlx_lm", "tests", "bench", "examples")  # models/mlx_lm_adapter.py: by name, late
BACKENDS = "mlxrt.bench.backends."  # programs of their own, each stands for the engine it imports
HEAVY = (
    "gguf", "huggingface_hub", "jinja2", "llguidance", "prompt_toolkit", "rich", "safetensors", "sentencepiece",
    "tokenizers",
)  # fmt: skip
IMPORTED_LATE = ("mlxrt.text.template_sandbox",)  # made of a heavy library: imported whole, inside functions only

LONGEST_FILE, LONGEST_FUNCTION, MEDIAN_FILE = 600, 60, 140
TOP_LEVEL = set(
    """__init__.py __init__.pyi __main__.py _openblas.py _interrupt.py py.typed errors.py config.py
    engine cache models kernels weights text bench cli server""".split()
)

# Underscore names that are public after all, or belong to another library.
NAMED_TUPLE = ("_replace", "_asdict", "_fields", "_make")
OTHER_LIBRARIES = ("os._exit", "argparse._ArgumentGroup", "command._build_session", "command._build_package_finder")
PRIVATE_READS_IN_TESTS = 20  # how many the tests may have; the package has none

# Broad excepts, each with its reason; everywhere else an except names what it expects.
BROAD = {
    "mlxrt.engine.sampler.run_callback": "a user's callback may raise anything, and ends only its own request",
    "mlxrt.engine.engine.stream": "cancels what was submitted, then raises on",
    "mlxrt.engine.core.step": "whatever stops a step halfway stops the engine, and is raised on",
    "mlxrt.engine.core._emit": "what a request's text does ends only that request",
    "mlxrt.engine.output.__call__": "a user's hook may raise anything; it is logged and not called again",
    "mlxrt.engine.output.deliver": "a user's listener may raise anything, and ends only its own request",
    "mlxrt.engine.output.finish": "what a request's text does ends only that request",
    "mlxrt.engine.threads.acquire": "gives up its place in the line, then raises on",
    "mlxrt.engine.async_stream.open": "cancels what was submitted, then raises on",
    "mlxrt.engine.async_stream.wait_submitted": "forgets what could not be opened, then raises on",
    "mlxrt.engine.async_engine._run_jobs": "carried to the coroutine that asked",
    "mlxrt.engine.async_engine._encode_next": "carried to the coroutine that asked",
    "mlxrt.engine.async_engine._run": "a defect is logged, and the thread ends",
    "mlxrt.server.access.__call__": "an answer must come whatever happened; it is logged with its request's id",
    "mlxrt.server.answering._send_all": "the status is out, so the stream itself must tell what went wrong",
    "tests.long.clients.calls.check": "a client may raise anything; it goes into the table",
    "mlxrt.text.grammar.convert_gbnf": "the converter raises Exception itself for a rule that is not there",
    "mlxrt.text.vocabulary.rust_call": "the Rust library raises Exception itself, and panics as a BaseException",
    "mlxrt.cli.chat_tools.load_functions": "a user's file of tools may raise anything; it is reported",
    "mlxrt.cli.chat_tools._run": "a user's tool may raise anything; the model is told",
    "tests.support.fuzz.child.load_all": "what is not ours is the failure that is looked for",
    "tests.support.odd_calls.play": "what is not ours is the failure that is looked for",
    "mlxrt.text.grammar.run": "carried out of a thread and raised by whoever asks for the result",
    "tests.long.mutate_formats.ask": "what is not ours is the failure that is looked for",
    "tests.long.mutate_formats.is_of_form": "what others' parsers raise on forms they do not know, by no common type",
    "tests.long.fuzz_jang.serve": "what is not ours is the failure that is looked for",
    "tests.support.fuzz.pool.work": "carried out of a thread and raised by whoever closes the pool",
}
ABSTRACT = ("mlxrt.models.base", "mlxrt.models.gemma")  # nn.Module has a metaclass of its own: no abc there


def unit(name: str) -> str:
    """The layer a module belongs to: mlxrt.cache.memory.paged -> cache.memory."""
    rest = name.removeprefix("mlxrt").removeprefix(".")
    for subpackage in ("cache.memory", "cache.storage"):
        if rest == subpackage or rest.startswith(f"{subpackage}."):
            return subpackage
    return rest.split(".")[0] or PUBLIC_NAMES


def wrong_directions(tree: Tree) -> list[str]:
    found = []
    for module in tree:
        own = unit(module.name)
        if own != PUBLIC_NAMES and own not in LAYERS:
            found.append(f"{module.name} is in no layer; give it a line in LAYERS")
            continue
        allowed = {own, *(LAYERS[own].split() if own in LAYERS else ("_openblas", "_interrupt"))}
        for i in module.imports:
            target = tree.resolve(i.target)
            # the package itself is reachable for its version alone
            if i.typing or not target.startswith("mlxrt") or i.target == "mlxrt.__version__":
                continue
            if target == PUBLIC_NAMES and module.name.startswith(BACKENDS):
                continue  # a program of its own uses the public names like any other
            if unit(target) not in allowed:
                found.append(f"{module.name}:{i.line} imports {target}: {own} may import {', '.join(sorted(allowed))}")
    return found


def third_party_imports(tree: Tree) -> list[str]:
    found = []
    for module in tree:
        for i in module.imports:
            top = i.target.split(".")[0]
            if top in NEVER and not module.name.startswith(BACKENDS):
                found.append(f"{module.name}:{i.line} imports {top}, which the runtime never does")
            heavy = (top in HEAVY and module.name not in IMPORTED_LATE) or i.target.startswith(IMPORTED_LATE)
            if heavy and not i.late and not i.typing:
                found.append(f"{module.name}:{i.line} imports {top} at its top; import it where it is used")
    return found


def too_long(tree: Tree) -> list[str]:
    found = []
    for module in tree:
        if (lines := len(module.text.splitlines())) > LONGEST_FILE:
            found.append(f"{module.path} has {lines} lines, {LONGEST_FILE} at most")
        for f in module.functions():
            if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) > LONGEST_FUNCTION:
                found.append(f"{module.name}.{f.name} has {lines} lines, {LONGEST_FUNCTION} at most")
    return found


def is_any(caught: ast.expr | None) -> bool:
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def is_broad(handler: ast.ExceptHandler) -> bool:
    return any(map(is_any, handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]))


def suppresses_all(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("suppress") and any(map(is_any, call.args))


def is_empty(handler: ast.ExceptHandler) -> bool:
    """Nothing but pass, ... or a string."""
    idle = [
        isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in handler.body
    ]
    return all(idle)


def bad_excepts(tree: Tree) -> list[str]:
    found = []
    for module in tree:
        for node in module.nodes:
            if isinstance(node, ast.Call) and suppresses_all(node):
                found.append(f"{module.name}:{node.lineno} suppresses everything")
            if not isinstance(node, ast.ExceptHandler):
                continue
            if is_broad(node) and module.place(node.lineno) not in BROAD:
                found.append(f"{module.place(node.lineno)}:{node.lineno} catches everything; name what is expected")
            if is_empty(node):
                found.append(f"{module.place(node.lineno)}:{node.lineno} passes over an error in silence")
    return found


def unfinished(tree: Tree) -> list[str]:
    found = []
    for module in tree:
        for n, line in enumerate(module.text.splitlines(), 1):
            if re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", line):
                found.append(f"{module.name}:{n} says {line.strip()}")
        for node in module.nodes:
            stub = isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc)
            if stub and module.name not in ABSTRACT:
                found.append(f"{module.name}:{node.lineno} is a stub")
    return found


def poor_names(tree: Tree) -> list[str]:
    found = []
    for module in tree:
        if module.path.stem in ("utils", "util", "helpers", "helper", "common", "misc"):
            found.append(f"{module.path} is named for nothing it holds")
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and re.search(r"(Utils?|Impl|Helper)$", node.name):
                found.append(f"{module.name}:{node.lineno} class {node.name}: name it for what it is")
        for f in module.functions():
            if f.name.startswith("get_"):
                found.append(f"{module.name}.{f.name}: functions are verbs that say what happens, not get_")
    return found


def import_cycles(tree: Tree) -> list[str]:
    """Modules that import each other, late imports included, imports for the type checker not."""
    graph = {
        m.name: {t for i in m.imports if not i.typing and (t := tree.resolve(i.target)) in tree.modules} - {m.name}
        for m in tree
    }
    reach = {name: graph[name] - {PUBLIC_NAMES} for name in graph}
    done = False
    while not done:  # the transitive closure; a few hundred modules
        wider = {name: found.union(*(reach[target] for target in found)) for name, found in reach.items()}
        done, reach = wider == reach, wider
    cycles = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]}
    return [f"import cycle: {', '.join(cycle)}" for cycle in sorted(cycles)]


def own_names(tree: ast.Module) -> set[str]:
    """What a module defines, attributes of its classes' instances included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            found.add(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def private_reads(tree: Tree) -> list[str]:
    """Underscore names of other modules: imported, or read from an object that is not `self`."""
    found = []
    for module in tree:
        own = own_names(module.tree)
        for i in module.imports:
            name = i.target.rpartition(".")[2]
            if is_private(name) and i.target.startswith("mlxrt") and i.target not in tree.modules:
                found.append(f"{module.name}:{i.line} imports {i.target}")
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                read = ast.unparse(node)
                if read not in OTHER_LIBRARIES:
                    found.append(f"{module.name}:{node.lineno} reads {read}")
    return found


RULES = (
    wrong_directions,
    import_cycles,
    private_reads,
    third_party_imports,
    too_long,
    bad_excepts,
    unfinished,
    poor_names,
)
PACKAGE = Tree(ROOT, "mlxrt")
AROUND = Tree(ROOT, "mlxrt", "bench", "tests", "examples")


@pytest.mark.parametrize(
    "rule",
    [wrong_directions, import_cycles, private_reads, third_party_imports, unfinished, poor_names],
    ids=lambda r: r.__name__,
)
def test_package_keeps_the_rule(rule):
    assert not (found := rule(PACKAGE)), "\n".join(found)


@pytest.mark.parametrize("rule", [too_long, bad_excepts], ids=lambda r: r.__name__)
def test_everything_keeps_the_rule(rule):
    assert not (found := rule(AROUND)), "\n".join(found)


def test_top_level_shows_the_architecture():
    entries = {path.name for path in (ROOT / "mlxrt").iterdir() if path.name != "__pycache__"}
    assert entries == TOP_LEVEL


def test_files_are_neither_long_nor_crumbs():
    lengths = [len(module.text.splitlines()) for module in PACKAGE]
    assert statistics.median(lengths) <= MEDIAN_FILE


def test_tests_read_ever_fewer_private_attributes():
    found = private_reads(Tree(ROOT, "tests", "bench", "examples"))
    assert len(found) <= PRIVATE_READS_IN_TESTS, "\n".join(found)


def test_layers_only_name_layers_before_them():
    seen: set[str] = set()
    for name, allowed in LAYERS.items():
        assert not (later := set(allowed.split()) - seen), f"{name} names {later}, which comes after it"
        seen.add(name)


def test_exceptions_to_the_rules_still_exist():
    """A name in these lists that nothing needs any more would hide the next fault."""
    broad = {m.place(n.lineno) for m in AROUND for n in m.nodes if isinstance(n, ast.ExceptHandler) and is_broad(n)}
    assert set(BROAD) == broad
    assert {unit(m.name) for m in PACKAGE} - {PUBLIC_NAMES} == set(LAYERS)


@pytest.mark.parametrize(
    "start",
    ["mlxrt.engine.scheduler", "mlxrt.engine.request", "mlxrt.cache.prefix_cache", "mlxrt.text", "mlxrt._openblas"],
)
def test_no_way_leads_to_mlx(start):
    ways = PACKAGE.reached(start, without=("mlxrt",))  # the package's __init__ imports it for everybody
    to_mlx = [" -> ".join(way) for target, way in ways.items() if target.split(".")[0] == "mlx"]
    assert not to_mlx, "\n".join(to_mlx)
    assert len(ways) > 1 or start == "mlxrt._openblas"


def test_import_of_mlxrt_is_light():
    """What `import mlxrt` brings, asked of a fresh interpreter, and what it brings besides MLX."""

    def loaded_by(package):
        code = f"import sys, {package}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    loaded = loaded_by("mlxrt")
    assert {"mlxrt", "mlx"} <= loaded
    assert not loaded & {*NEVER, *HEAVY, "numpy", "argparse", "requests", "httpx"}
    assert not loaded - loaded_by("mlx.core") & {"pathlib", "re", "typing", "urllib", "dataclasses", "logging"}


FAULTS = {
    wrong_directions: ("cache/early.py", "from ..engine import Engine\n", "mlxrt.cache.early:1 imports mlxrt.engine"),
    import_cycles: ("engine.py", "from .models import f\n", "import cycle: mlxrt.engine, mlxrt.models"),
    private_reads: ("text/nosy.py", "from ..engine import _queue\n", "imports mlxrt.engine._queue"),
    third_party_imports: ("text/heavy.py", "import jinja2\n", "jinja2"),
    too_long: ("errors.py", "def f():\n" + "    x = 1\n" * 60, "61 lines"),
    bad_excepts: (
        "config.py",
        "def f():\n    try:\n        g()\n    except (KeyError, Exception):\n        h()\n",
        "config.f",
    ),
    unfinished: ("engine.py", "x = 1  # TODO: more\n", "TODO"),
    poor_names: ("text/utils.py", "class PoolHelper:\n    pass\n", "PoolHelper"),
}
MORE_FAULTS = (
    (private_reads, "text/nosy.py", "class A:\n    _a = 1\n\ndef f(a, b):\n    return a._a + b._b\n", "reads b._b"),
    (wrong_directions, "novelty.py", "x = 1\n", "in no layer"),
    (wrong_directions, "text/late.py", "def f():\n    from ..models import Request\n", "mlxrt.models"),
    (third_party_imports, "late.py", "def f():\n    import torch\n", "torch"),
    (third_party_imports, "text/early.py", "from .template_sandbox import Sandbox\n", "imports mlxrt at its top"),
    (too_long, "errors.py", "x = 1\n" * 601, "601 lines"),
    (bad_excepts, "config.py", "try:\n    g()\nexcept KeyError:\n    pass\n", "in silence"),
    (bad_excepts, "config.py", "try:\n    g()\nexcept:\n    h()\n", "catches everything"),
    (bad_excepts, "config.py", "import contextlib\nwith contextlib.suppress(Exception):\n    g()\n", "suppresses"),
    (unfinished, "engine.py", "def f():\n    raise NotImplementedError('later')\n", "stub"),
    (poor_names, "config.py", "def get_it():\n    return 1\n", "get_it"),
)


@pytest.mark.parametrize(
    ("rule", "path", "text", "message"), [*((rule, *fault) for rule, fault in FAULTS.items()), *MORE_FAULTS]
)
def test_planted_faults_are_found(rule, path, text, message, tmp_path):
    assert set(FAULTS) == set(RULES)
    late = "def f():\n    from .engine import x\n\n    return x\n"
    for name, content in {"engine.py": "x = 1\n", "models.py": late, path: text}.items():
        file = tmp_path / "mlxrt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    assert any(message in line for line in rule(Tree(tmp_path, "mlxrt")))


def test_way_to_mlx_is_found_through_others(tmp_path):
    folder = tmp_path / "mlxrt"
    folder.mkdir()
    (folder / "scheduler.py").write_text("from .request import Request\n")
    (folder / "request.py").write_text("def f():\n    import mlx.core as mx\n    return mx\n")
    ways = Tree(tmp_path, "mlxrt").reached("mlxrt.scheduler", without=("mlxrt",))
    assert ways["mlx.core"] == ("mlxrt.scheduler", "mlxrt.request", "mlx.core")


def test_modules_have_docstrings():
    silent = [m.name for m in PACKAGE if m.text.strip() and not ast.get_docstring(m.tree)]
    assert not silent, f"no docstring: {', '.join(silent)}"


def test_type_hints_are_no_imports(tmp_path):
    file = tmp_path / "mlxrt" / "cache.py"
    file.parent.mkdir()
    file.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .engine import Engine\n")
    (file.parent / "engine.py").write_text("x = 1\n")
    module: Module = Tree(tmp_path, "mlxrt").modules["mlxrt.cache"]
    assert [i.typing for i in module.imports] == [False, True]
    assert not wrong_directions(Tree(tmp_path, "mlxrt"))
