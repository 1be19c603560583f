"""The law of the layers, read from the source: who imports whom, who uses what, and no state in modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "emlxd").rglob("*.py"))

# Lowest first. A room imports its own floor and those below it.
FLOORS = (
    {
        *("errors", "core", "config", "config_values", "log", "json_files", "version", "threads"),
        *("tracing", "metrics", "instruments", "exposition", "vllm_names"),
    },
    {"text", "config_document", "config_file", "keys", "sources", "downloads"},
    {"graph"},
    {"worker"},
    {"registry", "residency", "readings", "memory", "footprint", "description", "reload", "operate"},
    {"api"},
    {"server", "bench", "service"},
    {"daemon"},
    {"cli", "__main__"},
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# What only some rooms may import.
RESERVED = {
    "mlx": {"graph"},
    "quart": {"api", "server"},
    "hypercorn": {"api", "server"},
}
THREAD_ROOMS = {"worker", "threads"}
THREAD_STARTERS = {
    "Thread",
    "Timer",
    "ThreadPoolExecutor",
    "start_new_thread",
    "to_thread",
    "run_in_executor",
}

CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONTAINER_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add", "discard"),
    *("update", "setdefault", "popitem", "appendleft", "popleft", "extendleft", "rotate"),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """``emlxd.graph.step`` is in ``graph``. The package itself, which holds the version, is in none."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported module with its line, inside functions and TYPE_CHECKING blocks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from emlxd import graph` names a module where `from emlxd.core import Usage` names a class.
            yield from (
                (node.lineno, f"{base}.{alias.name}" if base == "emlxd" else base) for alias in node.names
            )


def import_breaches(module: str, source: str) -> list[str]:
    own = room(module)
    found = []
    for line, target in imports(ast.parse(source)):
        if target.startswith("."):
            found.append(f"{module}:{line} imports {target}, expected the full name")
        top = target.split(".")[0]
        allowed = RESERVED.get(top)
        if allowed is not None and own not in allowed:
            found.append(f"{module}:{line} imports {top}, which only {sorted(allowed)} may")
        if top == "emlxd" and room(target) in FLOOR_OF and FLOOR_OF[room(target)] > FLOOR_OF.get(own, 0):
            found.append(f"{module}:{line} imports {target}, which is above it")
    return found


def thread_breaches(module: str, source: str) -> list[str]:
    if room(module) in THREAD_ROOMS:
        return []
    names = (
        (node.lineno, node.attr if isinstance(node, ast.Attribute) else node.id)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute | ast.Name)
    )
    return [f"{module}:{line} starts a thread with {name}" for line, name in names if name in THREAD_STARTERS]


def state_breaches(module: str, source: str) -> list[str]:
    """``global`` statements, containers of a module that its code changes, and empty ones."""
    tree = ast.parse(source)
    found = [f"{module}:{node.lineno} says global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    containers = dict(module_containers(tree))
    for name, value in containers.items():
        if not getattr(value, "elts", True) or not getattr(value, "keys", True) or bare_call(value):
            found.append(f"{module}:{value.lineno} {name} is an empty container")
    for node in ast.walk(tree):
        name = changed_name(node)
        if name in containers:
            found.append(f"{module}:{node.lineno} changes {name}")
    return found


def module_containers(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        called = isinstance(value, ast.Call) and callee(value) in CONTAINER_CALLS
        if isinstance(value, CONTAINERS) or called:
            yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def callee(call: ast.Call) -> str:
    return getattr(call.func, "id", None) or getattr(call.func, "attr", "")


def bare_call(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and (not value.args or callee(value) == "defaultdict")
        and not value.keywords
    )


def changed_name(node: ast.AST) -> str | None:
    """The name whose value this node changes in place."""
    target: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        target = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        target = node.func.value
    elif isinstance(node, ast.AugAssign):
        target = node.target
    return target.id if isinstance(target, ast.Name) else None


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """One cycle of the graph as a path, empty if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(edges.get(module, ())):
            if found := visit(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(edges))), [])


def module_edges() -> dict[str, set[str]]:
    """Which module of the package imports which, a name in a package counting as its module if it is one."""
    modules = {module_name(path): path for path in SOURCES}
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        targets = {target for _, target in imports(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                targets |= {f"{node.module}.{alias.name}" for alias in node.names}
                # The package is only the way to its module, and its __init__ no dependency of ours.
                if all(f"{node.module}.{alias.name}" in modules for alias in node.names):
                    targets.discard(node.module or "")
        edges[module] = (targets & modules.keys()) - {"emlxd"}
    return edges


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_module_keeps_the_law(path: Path) -> None:
    module, source = module_name(path), path.read_text()
    checks = (import_breaches, thread_breaches, state_breaches)
    assert [breach for check in checks for breach in check(module, source)] == []


def test_every_room_has_its_floor() -> None:
    rooms = {room(module_name(path)) for path in SOURCES} - {""}
    assert rooms <= FLOOR_OF.keys()


def test_there_are_no_cycles() -> None:
    assert cycle(module_edges()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("emlxd.graph.step", "from emlxd.worker.engine import Engine"),
        ("emlxd.graph.step", "def f():\n    import emlxd.api.app"),
        (
            "emlxd.worker.engine",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from emlxd import api",
        ),
        ("emlxd.text.stop", "from ..graph import step"),
        ("emlxd.core", "from emlxd.text.stop import StopStrings"),
        ("emlxd.api.app", "import mlx.core as mx"),
        ("emlxd.worker.engine", "from quart import Quart"),
    ],
)
def test_an_import_against_the_law_is_found(module: str, source: str) -> None:
    assert import_breaches(module, source)


@pytest.mark.parametrize(
    "source", ["import threading\nthreading.Thread()", "import asyncio\nasyncio.to_thread(print)"]
)
def test_a_thread_outside_its_rooms_is_found(source: str) -> None:
    assert thread_breaches("emlxd.api.app", source)
    assert not thread_breaches("emlxd.worker.worker", source)


@pytest.mark.parametrize(
    "source",
    [
        "models = {}",
        "models: dict[str, int] = dict()",
        "from collections import defaultdict\nmodels = defaultdict(list)",
        "names = ['a']\ndef f():\n    names.append('b')",
        "names = {'a': 1}\ndef f():\n    names['b'] = 2",
        "names = {'a': 1}\ndef f():\n    del names['a']",
        "count = 0\ndef f():\n    global count\n    count += 1",
    ],
)
def test_state_in_a_module_is_found(source: str) -> None:
    assert state_breaches("emlxd.core", source)


@pytest.mark.parametrize("source", ["TABLE = {'a': 1}", "def f():\n    names = []\n    names.append(1)"])
def test_a_table_and_a_local_are_no_state(source: str) -> None:
    assert not state_breaches("emlxd.core", source)


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
