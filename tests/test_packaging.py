"""The wheel holds the library and the experiments in one package, and leaves nothing behind where it is built."""

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
from experiments import EXPERIMENTS
from jaxfl.__main__ import main

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


def run(words, installed, folder):
    """Output and errors of `python WORDS`, in a folder, with the wheel and what it depends on."""
    # No site-packages of its own: where the tests run, an editable install makes this checkout importable.
    dependencies = [path for path in sys.path if "site-packages" in path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed[0]), *dependencies])}
    done = subprocess.run(
        [sys.executable, "-S", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout, done.stderr


def test_the_wheel_is_one_package_with_its_types_version_and_experiments(installed):
    site, left = installed
    names = {path.name for path in site.iterdir()}
    (metadata,) = (name for name in names if name.endswith(".dist-info"))
    assert names == {"jaxfl", metadata}
    assert (site / "jaxfl" / "py.typed").exists()
    stubs, ours = ({path.relative_to(folder) for path in folder.rglob("jaxfl/**/*.pyi")} for folder in (site, ROOT))
    assert stubs == ours
    files = [path.relative_to(site / "jaxfl" / "experiments") for path in (site / "jaxfl" / "experiments").rglob("*.*")]
    assert {path.suffix for path in files} == {".py"}
    assert {path.parts[0] for path in files if len(path.parts) > 1} == {*EXPERIMENTS, "plan"}
    assert PathDistribution(site / metadata).version == jaxfl.__version__
    (script,) = PathDistribution(site / metadata).entry_points
    assert (script.group, script.name, script.load()) == ("console_scripts", "jaxfl", main)
    assert left == set(), "a folder build/ would bring removed modules into the next wheel"


@pytest.mark.parametrize("with_init", [False, True], ids=["without __init__", "with __init__"])
def test_a_users_own_experiments_and_ours_do_not_hide_each_other(installed, tmp_path, with_init):
    (tmp_path / "experiments").mkdir()
    code = "import pathlib, jaxfl; print('mine', pathlib.Path(jaxfl.__file__).parents[1])"
    (tmp_path / "experiments" / "mine.py").write_text(code)
    if with_init:
        (tmp_path / "experiments" / "__init__.py").touch()
    printed, complaints = run(["-m", "experiments.mine"], installed, tmp_path)
    assert printed.split() == ["mine", str(installed[0])], complaints
    presets, complaints = run(["-m", "jaxfl", "similarity", "--list-presets"], installed, tmp_path)
    assert "Presets of jaxfl similarity" in presets, complaints


def test_the_command_in_a_checkout_takes_the_checkouts_experiments(tmp_path, capsys):
    """Also from a folder that has a package of that name, and it says how they are run there."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "jaxfl", "similarity", "--list-presets"]
    printed = subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert "Presets of python -m experiments.similarity" in printed
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in ("epsilon", *EXPERIMENTS))
    assert main(["privsgp"]) == 2
    says = r"error: name: must be one of epsilon, .*; got 'privsgp'. Did you mean privsgp_vr\? See jaxfl --help.\n"
    assert re.fullmatch(says, capsys.readouterr().err)
    assert main(["fedavg"]) == 2
    assert "got 'fedavg'. It is a method: python -m experiments." in (said := capsys.readouterr().err)
    assert "python -m experiments.methods --method FedAvg" in said
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxfl {jaxfl.__version__}\n"


def test_a_shell_completes_commands_and_their_options(tmp_path, capsys):
    assert main(["--completion"]) == 0
    script = tmp_path / "jaxfl.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words):
        shell = f". {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _jaxfl"
        done = subprocess.run(["bash", "-c", f'{shell}; echo "${{COMPREPLY[@]}}"'], check=True, capture_output=True)
        return done.stdout.decode().split()

    assert completed("jaxfl", "priv") == ["privsgp_vr"]
    assert completed("jaxfl", "--ver") == ["--version"]
    assert completed("jaxfl", "privsgp_vr", "--target") == ["--target-epsilon"]
    assert {*completed("jaxfl", "epsilon", "--target")} == {"--target", "--target-epsilon"}
    assert completed("jaxfl", "plan", "--ep") == ["--epsilon"]
    assert completed("jaxfl", "plan", "--clip") == ["--clip-norm"]
    assert completed("jaxfl", "bench", "") == []
    assert {"PrivSGP", "ADP2SGD"} <= {*completed("jaxfl", "privsgp_vr", "--quiet", "--method", "")}
    assert completed("jaxfl", "privsgp_vr", "--method", "PrivSGP", "DP2") == ["DP2-SGD"], "behind another value"
    assert completed("jaxfl", "privsgp_vr", "--method", "PrivSGP", "--clip") == ["--clip-norm"]
    assert completed("jaxfl", "plan", "--graph", "directed") == ["directed_ring"]
    assert completed("jaxfl", "plan", "a.csv", "--trust", "p") == ["pairs"]
    assert completed("jaxfl", "dzofl", "--dataset", "mn") == ["mnist"]
    assert completed("jaxfl", "dzofl", "--baselines", "") == ["alone", "pooled"]
    assert completed("jaxfl", "dzofl", "--partition", "dir") == ["dirichlet"]
    assert completed("jaxfl", "report", "run", "--figures", "p") == ["pdf", "png"]
    assert completed("jaxfl", "epsilon", "--method", "SCAF") == ["SCAFFOLD"]
    assert completed("jaxfl", "plan", "--label-column", "y", "") == [], "names of files"


def test_a_reader_that_goes_away_ends_the_command_without_a_word():
    words = "jaxfl epsilon --sites 50 --samples 9 --batch 3 --rounds 3 --noise-multiplier 1".split()
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == b""


def test_no_page_prints_an_install_by_a_name_that_no_index_has():
    texts = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("jaxfl/**/*.py"),
        *ROOT.glob("experiments/**/*.py"),
    ]
    actual = [str(path) for path in texts if re.search(r"pip install '?jaxfl", path.read_text())]
    assert actual == []
