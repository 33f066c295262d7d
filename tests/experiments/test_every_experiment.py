"""Promises of every experiment, tested on each that there is: a new one joins by existing."""

import ast
import contextlib
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import leave_undrawn
from run_files import run_bytes, run_lines
from test_command_line import without_boxes

import experiments
from experiments import EXPERIMENTS
from jaxfl.core import ArgumentError
from jaxfl.frame import Experiment, flat, main
from jaxfl.frame.choose import Choice, idle_options
from jaxfl.frame.experiment import request
from jaxfl.frame.options import flag, options, text_of, varies_by_words
from jaxfl.frame.run import saved_options
from jaxfl.training.json_files import jsonable
from jaxfl.training.pass_directory import PassDirectory
from jaxfl.training.summary import read_results

ALL = list(EXPERIMENTS)
TRAINED = [name for name in ALL if EXPERIMENTS[name].prepare is not None]
# What makes a run small, of experiments that have the option and let it count.
SMALL: dict[str, Any] = {
    "iterations": 4,
    "rounds": 4,
    "nodes": 5,  # as many as the named pairs of graphs have
    "evaluate_every": 2,
    "checkpoint_every": 1,
    "num_train": 300,
    "num_test": 60,
    "hidden": (4,),
    "batch_size": 2,
    "local_steps": 2,
    "noise_std": 0.05,
    "similarity_batch_size": 16,
    "quiet": True,
}
SMALL_HERE: dict[str, dict[str, Any]] = {  # where that does not fit
    "embracing_fl": {"nodes": 16, "hidden": (6, 5)},  # case 9 counts sixteenths; blocks of three classes
    "similarity": {"hidden": (6, 5, 4)},  # two sides of two layers
    "dp_gradient_tracking": {"smoothness": 2.0},  # not estimated anew in each run
    "dzofl": {"num_train": 200},  # of two classes
    "audit": {"num_train": 1000},  # 200 of each of 5 nodes
}
STEPS = (0.01, 0.02)  # of experiments with a step size


def quick(names, *of_these):
    """Names as parameters; all but these are slow, for they take the same way through the frame."""
    return [name if name in of_these else pytest.param(name, marks=pytest.mark.slow) for name in names]


def small(experiment: Experiment) -> dict[str, Any]:
    """The first line of the experiment's own comparison, made small; steps are given where they vary."""
    kept = {name: values[0] for axis in experiment.grid for name, values in axis.items() if name != "step_size"}
    for name, value in {**SMALL, **SMALL_HERE.get(experiment.name, {})}.items():
        if name in options(type(experiment.base)):
            with contextlib.suppress(ArgumentError):
                request(experiment, {**kept, name: value})
                kept[name] = value
    return kept


def steps(experiment: Experiment) -> tuple[dict[str, Any], ...]:
    """The axis that a small run has."""
    return ({"step_size": STEPS},) if "step_size" in options(type(experiment.base)) else ()


def words(changes: dict[str, Any]) -> list[str]:
    """Options as a command line."""
    return [word for name, value in changes.items() for word in (flag(name), *text_of(value).split())]


class Ended(NamedTuple):
    """A command that has ended."""

    name: str
    folder: Path
    arguments: list[str]
    printed: str

    def summary(self) -> dict[str, Any]:
        """Content of summary.json."""
        return json.loads((self.folder / "summary.json").read_text())

    def lines(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        return run_lines(self.folder)

    def query(self):
        """The request that the arguments made."""
        experiment = EXPERIMENTS[self.name]
        return request(experiment, small(experiment), (*steps(experiment), {"seed": (0, 1)}))


def run(name: str, *arguments: str) -> int:
    """The exit code of a command."""
    return main(EXPERIMENTS[name], arguments)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for compiled programs, so that every program is compiled once."""
    return ["--compilation-cache", str(tmp_path_factory.mktemp("programs"))]


@pytest.fixture(scope="module", params=quick(TRAINED, "privsgp_vr"))
def finished(request, tmp_path_factory, cache):
    """A small finished run with two seeds, and two step sizes where there are step sizes."""
    name = request.param
    folder = tmp_path_factory.mktemp(name) / "run"
    grid = [
        f"{option}={','.join(map(str, values))}" for axis in steps(EXPERIMENTS[name]) for option, values in axis.items()
    ]
    arguments = [*words(small(EXPERIMENTS[name])), *(["--grid", *grid] if grid else []), "--seeds", "0", "1", *cache]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "1000")
        assert run(name, *arguments, "--out", str(folder)) == 0
    return Ended(name, folder, arguments, printed.getvalue())


def content(folder):
    """Bytes of every file below a directory."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestFinishedRun:
    def test_config_holds_every_option_that_decides_results(self, finished):
        """And with it every line can be asked for again."""
        written = json.loads((finished.folder / "config.json").read_text())
        known, query = options(type(EXPERIMENTS[finished.name].base)), finished.query()
        saved = {name for name, option in known.items() if option.saved}
        assert set(saved_options(query)) == saved | {"cases"} <= set(written["config"])
        assert not {name for name, option in known.items() if not option.saved} & set(written["config"])
        lines = written["config"]["cases"]
        assert list(lines) == list(query.rows)
        for name, line in query.rows.items():
            again = {**written["config"], **lines[name]}
            expected = jsonable({key: value for key, value in flat(line.config).items() if key in saved}, "config")
            assert {key for key in saved if again[key] != expected[key]} <= {"node_loop"}  # what auto stands for
            assert tuple(lines[name]["seeds"]) == line.seeds
        assert (written["experiment"], written["preset"]) == (finished.name, None)
        assert {"jax", "platform", "device_kind", "git_revision"} <= set(written["environment"])

    def test_summary_has_the_documented_fields(self, finished):
        summary, lines = finished.summary(), finished.lines()
        assert set(summary) >= {"experiment", "preset", "status", "seeds", "cases", "seconds", "environment"}
        assert (summary["experiment"], summary["status"], summary["seeds"]) == (finished.name, "finished", [0, 1])
        assert list(summary["cases"]) == list(finished.query().rows)
        assert set(summary["seconds"]) == {"compile", "run", "per_round", "rounds_a_call", "command"}
        for name, row in summary["cases"].items():
            assert (row["rounds"], row["rounds_per_seed"], row["status"]) == (4, [4, 4], ["finished"] * 2)
            assert row["settings"] == jsonable(finished.query().rows[name].settings, "settings")
            last = [line for line in lines if (line["case"], line["round"]) == (name, 4)]
            for cost in ("operations", "simulated_seconds", "joules"):
                assert row["costs"][cost]["per_seed"] == [line[f"total_{cost}"] for line in last]
                assert min(row["costs"][cost]["per_seed"]) > 0
            assert row["train_loss"]["per_seed"] == [line["train_loss"] for line in last]

    def test_pictures(self, finished):
        pictures = sorted((finished.folder / "plots").iterdir())
        assert "training.png" in [path.name for path in pictures]
        for path in pictures:
            assert path.read_bytes().startswith(b"\x89PNG")
            assert path.stat().st_size > 5000
            assert str(path) in finished.printed

    def test_says_what_ran_and_where_it_is(self, finished):
        printed = " ".join(finished.printed.split())
        assert f"Run: {finished.folder}" in printed
        assert "mean ± standard deviation over 2 seeds, finished" in printed
        assert re.search(r"[\d.]+[kMG]?bit [\d.]+[mµ]?s [\d.]+[mµ]?J", printed)
        settings = [value for row in finished.query().rows.values() for value in row.settings.values()]
        assert all(text_of(value) in printed for value in settings)


@pytest.fixture
def undrawn(monkeypatch):
    """The finished run's pictures are looked at."""
    leave_undrawn(monkeypatch)


@pytest.mark.usefixtures("undrawn")
class TestBesideAFinishedRun:
    def refused(self, finished, arguments, capsys):
        """The error line; nothing of the run has changed."""
        before = content(finished.folder)
        assert run(finished.name, *finished.arguments, "--out", str(finished.folder), *arguments) == 2
        output = capsys.readouterr()
        assert content(finished.folder) == before
        assert (output.out, output.err.count("\n")) == ("", 1)
        return output.err

    def test_not_overwritten(self, finished, capsys):
        says = f"error: --out: must not hold a run yet; {finished.folder} holds one. Resume it (--resume)"
        assert self.refused(finished, [], capsys).startswith(says)

    def test_not_resumed_with_another_config(self, finished, capsys):
        place = finished.arguments.index("--evaluate-every") + 1
        other = finished._replace(arguments=[*finished.arguments[:place], "1", *finished.arguments[place + 1 :]])
        says = f"error: --evaluate-every: must be as in the run that is resumed; {finished.folder} has 2, this call"
        assert self.refused(other, ["--resume"], capsys).startswith(says)

    def test_resuming_it_changes_nothing(self, finished, tmp_path, capsys):
        shutil.copytree(finished.folder, tmp_path / "run")
        assert run(finished.name, *finished.arguments, "--resume", "--out", str(tmp_path / "run")) == 0
        after, before = content(tmp_path / "run"), content(finished.folder)
        assert set(after) == set(before)
        assert {path for path in after if after[path] != before[path]} <= {p for p in after if p.suffix == ".png"}

    @pytest.mark.slow
    @pytest.mark.parametrize("finished", TRAINED, indirect=True)
    def test_interrupted_in_the_middle_and_resumed_equals_uninterrupted(self, finished, tmp_path, monkeypatch, capsys):
        append = PassDirectory.append

        def interrupted(self, lines):
            if any(line["round"] == 4 for line in lines):
                raise KeyboardInterrupt
            append(self, lines)

        command = [*finished.arguments, "--out", str(tmp_path / "run")]
        monkeypatch.setattr(PassDirectory, "append", interrupted)
        assert run(finished.name, *command) == 130
        says = "interrupted: the same command with --resume goes on from the last checkpoint\n"
        assert capsys.readouterr().err == says
        part, whole = (run_bytes(path) for path in (tmp_path / "run", finished.folder))
        assert part
        assert len(part) < len(whole)
        assert whole.startswith(part)
        assert not (tmp_path / "run" / "summary.json").exists()

        monkeypatch.setattr(PassDirectory, "append", append)
        assert run(finished.name, *command, "--resume") == 0
        assert run_bytes(tmp_path / "run") == whole
        tables = [read_results(path) for path in (tmp_path / "run", finished.folder)]
        assert [{**row, "seconds": 0} for row in tables[0]] == [{**row, "seconds": 0} for row in tables[1]]
        resumed, uninterrupted = finished._replace(folder=tmp_path / "run").summary(), finished.summary()
        assert {**resumed, "seconds": {}} == {**uninterrupted, "seconds": {}}
        assert content(tmp_path / "run" / "final") == content(finished.folder / "final")


@pytest.mark.parametrize("name", ALL)
class TestCommandLine:
    def test_help_has_every_option_with_its_value(self, name, capsys):
        experiment = EXPERIMENTS[name]
        known = options(type(experiment.base))
        for arguments in ([], ["--dataset", "mnist"], *(["--preset", preset] for preset in [*experiment.presets][:1])):
            if arguments[:1] == ["--dataset"] and "dataset" not in known:
                continue
            assert run(name, "--help-all", *arguments) == 0
            entries = re.split(r"^[│ ] (?=--\w)", capsys.readouterr().out, flags=re.M)[1:]
            texts = {re.split("[ ,]", entry)[0]: without_boxes(entry) for entry in entries}
            changes = {"dataset": "mnist"} if arguments[:1] == ["--dataset"] else {}
            preset = arguments[1] if arguments[:1] == ["--preset"] else None
            asked = request(experiment, changes, (), preset)
            compared = {name: part[name] for part in asked.grid for name in part if len(part[name]) > 1}
            compared = {name: tuple(compared[name]) for name in compared if varies_by_words(known[name].kind)}
            for option, value in (flat(asked.config) | compared).items():
                shown = shlex.join(map(str, value)) if isinstance(value, tuple) else str(value)
                assert re.search(rf" [A-Za-z].* \(default: {re.escape(shown)}\)", texts[flag(option)]), "what it does"

    def test_short_help_has_the_usual_options_and_says_how_many_more_there_are(self, name, capsys):
        shown = {}
        for word in ("--help", "--help-all"):
            assert run(name, word) == 0
            printed = capsys.readouterr().out
            shown[word] = (
                set(re.findall(r"^[│ ] (--[?[\w-]+)", printed, flags=re.M)),
                " ".join(without_boxes(printed).split()),
            )
        usual, every = shown["--help"][0], shown["--help-all"][0]
        assert usual <= every
        assert len(usual) <= 40
        assert re.search(rf"--help-all shows {len(every) - len(usual)} further options", shown["--help"][1])

    def test_a_misspelt_option_suggests_the_right_one(self, name, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        option = flag(next(iter(options(type(EXPERIMENTS[name].base)))))
        assert run(name, f"{option}x", "1") == 2
        output = capsys.readouterr()
        says = "must be an option of this experiment; there is none of that name. Did you mean"
        assert output.err.startswith(f"error: {option}x: {says} {option}?")
        assert (output.out, output.err.count("\n")) == ("", 1)
        assert not list(tmp_path.iterdir())

    def test_presets_are_listed_with_their_cost(self, name, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "1000")
        assert run(name, "--list-presets") == 0
        printed = capsys.readouterr().out
        for preset, row in EXPERIMENTS[name].presets.items():
            assert all(text in printed for text in (preset, row.description, row.cost))

    def test_every_option_is_read(self, name):
        """An attribute, a key of flat options, or a keyword of a function that a choice names."""
        config = EXPERIMENTS[name].base
        kinds = [kind for record in vars(config) for kind in type(getattr(config, record)).__mro__[:-1]]
        modules = {kind.__module__ for kind in kinds} | {f"experiments.{name}.options"}
        folders = {Path(str(sys.modules[module].__file__)).parent for module in modules if module in sys.modules}
        tables = [value for module in modules if module in sys.modules for value in vars(sys.modules[module]).values()]
        reads = {keyword for choice in tables if isinstance(choice, Choice) for keyword in choice.counts}
        for path in (path for folder in folders for path in folder.glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    reads.add(node.attr)
                elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                    reads.add(str(node.slice.value))
        records = {record: type(getattr(config, record)).__module__ for record in vars(config)}
        shared = {record for record, module in records.items() if module == "jaxfl.frame.records"}
        known = options(type(config))  # what the frame's own records read is the frame's
        assert {option for option in known if known[option].record not in shared} <= reads


PRESETS = [(name, preset) for name in ALL for preset in EXPERIMENTS[name].presets]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_every_preset_gives_lines_in_which_all_that_it_says_counts(name, preset):
    experiment = EXPERIMENTS[name]
    row = experiment.presets[preset]
    query = request(experiment, {}, (), preset)
    configs = [line.config for line in query.rows.values()]
    flats = [flat(config) for config in configs]
    varied = {option for axis in row.grid for option in axis}
    idle = set.intersection(*(idle_options(config, values) for config, values in zip(configs, flats, strict=True)))
    assert not {*row.changes, *varied} & idle
    for option, value in row.changes.items():
        assert option in varied or {values[option] for values in flats} == {value}
    for option, values in ((option, values) for axis in row.grid for option, values in axis.items()):
        known = {seed for line in query.rows.values() for seed in line.seeds} if option == "seed" else {
            values[option] for values in flats if option not in idle_options(configs[0], values)
        }  # fmt: skip
        assert known <= set(values)
        assert known == set(values) or option != "seed"


def test_experiments_are_the_packages_that_have_one():
    folder = Path(next(iter(experiments.__path__)))
    fronts = {path.parent.name: path.read_text() for path in folder.glob("*/__init__.py")}
    assert set(ALL) == {name for name, text in fronts.items() if "\nEXPERIMENT = " in text} >= {"privsgp_vr"}
    for name in ALL:
        assert EXPERIMENTS[name].name == name
        assert "main(EXPERIMENT)" in (folder / name / "__main__.py").read_text()
