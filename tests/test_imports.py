"""Rooms import one way; importing the package, or asking for help, imports nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qed_probe as qp

ROOT = Path(qp.__file__).parent
HEAVY = {"torch", "xarray", "zarr", "matplotlib", "transformers", "dask", "scipy", "numpy", "rich"}

# What stands directly below each room; a room may import these and all that is below them.
BELOW: dict[str, tuple[str, ...]] = {
    "errors": (),
    "data": (),
    "kernels": ("errors",),
    "models": ("kernels", "data"),
    "tasks": ("models",),
    "training": ("evaluation",),
    "store": ("errors",),
    "evaluation": ("tasks", "store"),
    "tracing": ("tasks", "store"),
    "replays": ("tracing",),
    "memory": ("replays",),
    "analyses": ("memory", "evaluation"),
    "eigen": ("analyses",),
    "figures": ("eigen",),
    "gallery": ("figures", "training"),
    "cli": ("gallery", "facade"),
}


def room_of(module: str) -> str:
    """The room of ``qed_probe.room...``; the package itself is the facade."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "facade"


def allowed(room: str) -> set[str]:
    return {room}.union(*(allowed(below) if below in BELOW else {below} for below in BELOW[room]))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import, those in functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            rooms = [f"qed_probe.{alias.name}" if alias.name in BELOW else module for alias in node.names]
            yield from ((node.lineno, name) for name in (rooms if module == "qed_probe" else [module]))


def back_edges(room: str, source: str) -> list[str]:
    """Imports of the package that ``room`` may not have."""
    ours = [(line, name) for line, name in imports(source) if name.split(".")[0] == "qed_probe"]
    return [f"line {line}: {room} imports {name}" for line, name in ours if room_of(name) not in allowed(room)]


def rooms() -> list[tuple[str, Path]]:
    files = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]
    return [(path.relative_to(ROOT).parts[0].removesuffix(".py"), path) for path in files]


@pytest.mark.parametrize(("room", "path"), rooms(), ids=[str(path.relative_to(ROOT)) for _, path in rooms()])
def test_rooms_import_one_way(room: str, path: Path) -> None:
    assert room in BELOW, f"{room} is a new room: give it a place in BELOW"
    assert back_edges(room, path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from qed_probe.models import config"),
        ("kernels", "from qed_probe import models"),
        ("models", "def f():\n    import qed_probe.tasks.niah"),
        ("store", "if TYPE_CHECKING:\n    from qed_probe.kernels import MIXERS"),
        ("training", "import qed_probe.tracing"),
        ("analyses", "import qed_probe as qp"),
        ("figures", "from qed_probe import trace"),
    ],
)
def test_the_walk_sees_a_back_edge(room: str, source: str) -> None:
    assert len(back_edges(room, source)) == 1


def test_the_store_names_no_torch() -> None:
    found = {name.split(".")[0] for room, path in rooms() if room == "store" for _, name in imports(path.read_text("utf-8"))}
    assert "zarr" in found
    assert found.isdisjoint({"torch", "triton", "safetensors", "transformers"})


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import qed_probe", HEAVY),
        ("import qed_probe.cli.app", HEAVY),
        ("import qed_probe.store.schema", {"torch"}),
        ("import qed_probe.models.capture", {"transformers"}),
    ],
)
def test_an_import_stays_light(statement: str, unwanted: set[str]) -> None:
    listing = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert unwanted.isdisjoint(listing.stdout.split())


def typed() -> dict[str, str]:
    """The facade's names as type checkers see them, each with the module it comes from."""
    tree = ast.parse((ROOT / "__init__.py").read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    pairs = [(node, alias) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname or alias.name: node.module or "" for node, alias in pairs}


def test_the_facade_is_what_type_checkers_see() -> None:
    assert {*typed(), "__version__"} == set(qp.__all__)
    assert len(qp.__all__) == len(set(qp.__all__))
    assert set(qp.__all__) <= set(dir(qp))


@pytest.mark.parametrize("name", sorted(typed()))
def test_every_name_of_the_facade_is_there(name: str) -> None:
    value = getattr(qp, name)
    home = typed()[name]
    assert value is (sys.modules[f"qed_probe.{name}"] if home == "qed_probe" else getattr(sys.modules[home], value_name(name)))


def value_name(name: str) -> str:
    return {"load_model": "load", "save_model": "save"}.get(name, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(qp, "nothing")  # noqa: B009 - so that type checkers do not see it
