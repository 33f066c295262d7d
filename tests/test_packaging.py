"""The wheel holds the library alone, typed, and leaves nothing behind where it is built."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import jaxfl
from jaxfl import command

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel of a copy of the project, unpacked; the names that building left in the copy."""
    folder = tmp_path_factory.mktemp("wheel")
    project = folder / "project"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in ("jaxfl", "experiments"):
        shutil.copytree(ROOT / name, project / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    before = set(os.listdir(project))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)
    (wheel,) = (folder / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site", set(os.listdir(project)) - before


def test_the_wheel_holds_the_library_alone_with_its_types_and_version(installed):
    site, left = installed
    names = {path.name for path in site.iterdir()}
    (metadata,) = (name for name in names if name.endswith(".dist-info"))
    assert names == {"jaxfl", metadata}
    assert (site / "jaxfl" / "py.typed").exists()
    assert PathDistribution(site / metadata).version == jaxfl.__version__
    (script,) = PathDistribution(site / metadata).entry_points
    assert (script.group, script.name, script.load()) == ("console_scripts", "jaxfl", command.main)
    assert left == set(), "a folder build/ would bring removed modules into the next wheel"


@pytest.mark.parametrize("with_init", [False, True], ids=["without __init__", "with __init__"])
def test_a_users_own_experiments_and_the_library_do_not_hide_each_other(installed, tmp_path, with_init):
    (tmp_path / "experiments").mkdir()
    code = "import pathlib, jaxfl; print('mine', pathlib.Path(jaxfl.__file__).parents[1])"
    (tmp_path / "experiments" / "mine.py").write_text(code)
    if with_init:
        (tmp_path / "experiments" / "__init__.py").touch()
    site, _ = installed
    # No site-packages of its own: where the tests run, an editable install makes this checkout importable.
    dependencies = [path for path in sys.path if "site-packages" in path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *dependencies])}
    command = [sys.executable, "-S", "-m", "experiments.mine"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["mine", str(site)], done.stderr


def test_no_page_prints_an_install_by_a_name_that_no_index_has():
    texts = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("jaxfl/**/*.py"),
        *ROOT.glob("experiments/**/*.py"),
    ]
    found = [str(path) for path in texts if re.search(r"pip install '?jaxfl", path.read_text())]
    assert found == []
