"""Imports run downward only, and no building block knows an algorithm."""

import ast
import importlib
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest
from registry import REGISTRY

import jaxfl

ROOT = Path(__file__).parent.parent
FLOORS = {  # a room imports from rooms of a lower floor, and from itself
    "on_use": -1,
    "core": 0,
    "graphs": 0.5,
    "gradients": 1,
    "privacy": 1,
    "channel": 1,
    "models": 1,
    "data": 1,
    "algorithms": 2,
    "training": 2,
    "analysis": 2,
    "frame": 2.5,
    "experiments": 3,
}
MAY_NOT = {"algorithms": {"training", "data", "models", "analysis"}, "training": {"algorithms", "analysis"}}
FILES = [
    p
    for folder in ("jaxfl", "experiments")
    for p in sorted((ROOT / folder).rglob("*.py"))
    if p.parent != ROOT / "jaxfl"
]
STUBS = sorted((ROOT / "jaxfl").rglob("__init__.pyi"))


def room_of(module):
    parts = module.split(".")
    return parts[0] if parts[0] == "experiments" else (parts[1] if parts[0] == "jaxfl" and len(parts) > 1 else None)


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (room_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxfl":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield room_of(node.module)


@pytest.mark.parametrize("path", [*FILES, *STUBS[1:]], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downward(path):
    own = path.relative_to(ROOT).parts[1 if path.is_relative_to(ROOT / "jaxfl") else 0]
    for room in imported_rooms(path):
        if room is None or room == own:
            continue
        assert room in FLOORS, f"{path} imports {room}, which has no floor"
        assert FLOORS[room] < FLOORS[own], f"{path} imports upward or sideways from {room}"
        assert room not in MAY_NOT.get(own, set())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 400, "split it"


def test_every_folder_of_code_is_a_package():
    """A folder without one is a namespace, which a folder of the same name elsewhere would extend."""
    assert not [path for path in FILES if not (path.parent / "__init__.py").exists()]


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        ("import jaxfl; assert jaxfl.__version__", "jax numpy"),
        (
            "import jaxfl; assert jaxfl.d_psgd and jaxfl.federate and jaxfl.graphs.ring(4) and jaxfl.gaussian(1.0)",
            "orbax matplotlib flax networkx sklearn dp_accounting scipy.stats scipy.signal scipy.optimize",
        ),
        (
            "import experiments.privsgp_vr; from jaxfl import analysis, privacy; assert privacy.statements",
            "orbax matplotlib flax networkx sklearn dp_accounting optax jax.extend scipy.special scipy.sparse",
        ),
        ("import jaxfl.data; assert jaxfl.data.load('digits')", "sklearn pandas scipy.stats scipy.special"),
        ("from jaxfl.__main__ import main; assert main([]) == 0", "jax numpy"),
    ],
    ids=["jaxfl", "a round", "a run", "digits", "the list"],
)
def test_what_is_not_needed_is_not_loaded(code, slow):
    code = f"import sys; {code}; found = {{*{slow.split()}}} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_a_name_stands_for_what_is_exported_though_a_module_has_it_too():
    for package in (jaxfl, jaxfl.core, jaxfl.privacy, importlib.import_module("jaxfl.privacy.tracking")):
        rooms = {name for name in dir(package) if ismodule(getattr(package, name))}
        assert rooms <= ({*FLOORS} if package is jaxfl else set())
    assert jaxfl.core.algorithm.__name__ == "algorithm"
    assert jaxfl.privacy.statements.__module__ == "jaxfl.privacy.releases"
    with pytest.raises(AttributeError, match=r"module 'jaxfl' has no attribute 'd_pgsd'.* mean d_psgd"):
        _ = getattr(jaxfl, "d_pgsd")  # noqa: B009


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_stub_is_the_one_list_of_a_packages_names(stub):
    """What is written in another form would be seen by type checkers only."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    package = importlib.import_module(".".join(stub.relative_to(ROOT).parts[:-1]))
    listed = vars(package)["__all__"]
    assert listed == sorted(names)
    assert [name for name in dir(package) if not name.startswith("_")] == listed
    assert all(getattr(package, name) is not None for name in listed)


def test_every_constructor_of_the_registry_is_at_the_top():
    at_top = [getattr(jaxfl, name) for name in dir(jaxfl)]
    assert [name for name, row in REGISTRY.items() if row.constructor not in at_top] == []
