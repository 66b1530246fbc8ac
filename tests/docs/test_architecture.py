"""Imports point down, as docs/architecture.md draws them."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "ragged_format"
OUTSIDE = {"adapters", "cli", "testing", "torch"}
THIRD_PARTY = {"numpy", "pyarrow", "xxhash", "zstandard"}

# From the floor up; a module imports its own layer and those below.
LAYERS = [
    {"errors", "codes", "arguments"},
    {"log_prob", "schema", "profiles", "parse"},
    {"lists", "canonical", "ragged", "soundness"},
    {"view", "rules", "rules_packed", "forest_index", "validate"},
    set(),  # containers and packing: whatever no other layer names
    {"adapters", "torch", "testing"},
    {"cli"},
]
CONTAINERS = 4


def layer_of(part):
    return next((n for n, names in enumerate(LAYERS) if part in names), CONTAINERS)


def part_of(path):
    """The top-level part of ragged_format that a file belongs to."""
    return path.relative_to(CORE).with_suffix("").parts[0]


def imports(path):
    """(module, whether only for type checks) of every import in a file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
            if node.module == "ragged_format":
                names = [f"ragged_format.{alias.name}" for alias in node.names]
        yield from ((name, id(node) in typing_only) for name in names)


FILES = [path for path in sorted(CORE.rglob("*.py")) if path != CORE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = part_of(path)
    for name, typing_only in imports(path):
        top, _, rest = name.partition(".")
        part = rest.split(".")[0]
        if top == "ragged_format" and is_module(part):
            assert typing_only or layer_of(part) <= layer_of(own), name
        elif top == "ragged_format":
            assert part == "" or own in OUTSIDE, f"{name}: the core imports its modules by name"
        elif own not in OUTSIDE:
            assert typing_only or top in THIRD_PARTY or top in sys.stdlib_module_names, name


def is_module(name):
    return (CORE / f"{name}.py").exists() or (CORE / name).is_dir()


@pytest.mark.parametrize("folder", ["pipeline/ragged_pipeline", "server/ragged_server"])
def test_pipeline_and_server_do_not_import_each_other(folder):
    other = {"ragged_pipeline", "ragged_server"} - {Path(folder).name}
    for path in (ROOT / folder).rglob("*.py"):
        assert not {name.split(".")[0] for name, _ in imports(path)} & other, path


# The rooms of the server and what each may import besides itself; settings and log lines, at the
# top of the package, are for all but the store.
SERVER = ROOT / "server/ragged_server"
ROOMS = {
    "store": set(),
    "client": {"store", "http"},  # their errors, which clients raise
    "http": {"store", "settings", "logs"},
    "process": {"store", "http", "settings", "logs"},
    "cli": {"store", "client", "process", "settings", "logs"},
}


def test_every_module_of_the_server_has_a_room():
    rooms = {path.parent.relative_to(SERVER).parts[:1] for path in SERVER.rglob("*.py")}
    assert rooms == {(), *((room,) for room in ROOMS)}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_server_import_down(room):
    for path in (SERVER / room).rglob("*.py"):
        for name, typing_only in imports(path):
            top, _, rest = name.partition(".")
            if top == "ragged_server":
                assert typing_only or rest.split(".")[0] in {room, *ROOMS[room]}, (path, name)
