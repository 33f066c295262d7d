"""Parts of every command line around a run: exit codes, sentences, help, presets, cache, folders, graph files."""

import re
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import refused
from toy_experiment import EXPERIMENT

from experiments import EXPERIMENTS
from experiments import __main__ as listing
from jaxfl import graphs
from jaxfl.core import ArgumentError
from jaxfl.data import load
from jaxfl.frame import command_line, main
from jaxfl.frame.run import new_run_directory
from jaxfl.graphs.files import read_graph
from jaxfl.training import Diverged, FatalCount


def toy(run, *arguments):
    """The exit code of the toy experiment with this run."""
    return main(EXPERIMENT._replace(run=run), list(arguments))


def raises(error):
    """A run that ends with an exception."""

    def run(query):
        raise error

    return run


class Failing:
    """A stream whose reader has gone, once."""

    def __init__(self, stream, fails):
        self.stream, self.fails, self.failed = stream, fails, False

    def __getattr__(self, name):
        if name == self.fails and not self.failed:
            self.failed = True
            return self.fail
        return getattr(self.stream, name)

    def fail(self, *words):
        raise BrokenPipeError(32, "Broken pipe")


class TestExitCodes:
    def test_finished(self):
        requests = []
        assert toy(lambda query: requests.append(query) or 0, "--rounds", "2", "--preset", "figure_1") == 0
        assert (requests[0].preset, requests[0].config.learning.rounds) == ("figure_1", 2)

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (ArgumentError("rounds", "must fit", "got 9", "Pass 3."), 2, "error: --rounds: must fit; got 9. Pass 3."),
            (ArgumentError("count", "must fit", "got\n9", "Pass 3."), 2, "error: --rounds: must fit; got 9. Pass 3."),
            (ArgumentError("other", "must fit", "got 9", "Pass 3."), 2, "error: other: must fit; got 9. Pass 3."),
            (
                Diverged("A", 3, "loss", rounds=(1, 9), first_round=4, node=2, value=float("nan")),
                1,
                "stopped: loss: must stay finite; got nan at node 2 in round 4 (rounds 1 to 9 of A, seed 3). Use",
            ),
            (FatalCount("3 batches overflowed.", (1, 5)), 1, "stopped: 3 batches overflowed."),
            (MemoryError(), 1, "stopped: the memory is exhausted. Take"),
            (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 9 bytes"), 1, "stopped: the memory is exhaus"),
            (OSError(28, "No space left on device", "a/b"), 1, "stopped: [Errno 28] No space left on device: 'a/b'."),
            (KeyboardInterrupt(), 130, "interrupted: nothing was kept"),
        ],
    )
    def test_code_and_one_line(self, error, code, line, capsys):
        assert toy(raises(error)) == code
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith(line)
        assert output.err.count("\n") == 1

    @pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), jax.errors.JaxRuntimeError("INTERNAL: a bug")])
    def test_bugs_keep_their_trace(self, error):
        with pytest.raises(type(error), match="a bug"):
            toy(raises(error))

    def test_a_lost_process_ends_the_others_in_one_sentence(self, capsys, monkeypatch):
        monkeypatch.setattr(command_line, "is_multiprocess", lambda: True)
        lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer\nand a trace")
        monkeypatch.setattr(command_line, "leave", sys.exit)  # it ends the process at once
        with pytest.raises(SystemExit, match=r"^1$"):
            toy(raises(lost))
        message = capsys.readouterr().err
        assert re.fullmatch(
            r"stopped: another process is gone \(UNKNOWN: Gloo .* peer\); .* --resume go on .*\n", message
        )

    def test_warnings_are_lines(self, capsys):
        def run(query):
            warnings.simplefilter("always")
            warnings.warn("beware", stacklevel=1)
            return 0

        show, filters = warnings.showwarning, list(warnings.filters)
        assert toy(run) == 0
        assert capsys.readouterr().err == "warning: beware\n"
        assert warnings.showwarning is show
        assert warnings.filters == filters


class TestWords:
    @pytest.mark.parametrize("arguments", [["--title", "a\udce4"], ["--compilation-cache=\udce4"], ["--title", "a\0"]])
    def test_what_is_no_utf_8_is_refused(self, arguments, capsys):
        assert toy(raises(ZeroDivisionError()), *arguments) == 2
        assert re.fullmatch(r"error: --(title|compilation-cache): must be UTF-8 .*\n", capsys.readouterr().err)

    def test_a_word_is_shown_by_its_ends(self, capsys):
        assert toy(raises(ZeroDivisionError()), "--rounds", "begin" + "x" * 10**6 + "end") == 2
        message = capsys.readouterr().err
        assert re.match(r"error: --rounds: must be an integer; got 'beginx+ \.\.\. x+end'\. ", message)
        assert len(message) < 1000

    def test_an_unknown_option_may_have_any_letters(self, capsys):
        assert toy(raises(ZeroDivisionError()), "\udce4") == 2
        assert "there is none of that name" in capsys.readouterr().err

    def test_an_integer_of_thousands_of_digits_is_refused(self, capsys):
        assert toy(raises(ZeroDivisionError()), "--rounds", "9" * 5000) == 2
        assert capsys.readouterr().err.startswith("error: --rounds: must be ")

    def test_squared_brackets_are_no_markup(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert main(EXPERIMENTS["spanning_tree"], ["--num-rounds", "3", "--out", "[/x]"]) == 0
        assert "Picture: [/x]/spanning_tree.png" in capsys.readouterr().out


class TestWithoutResume:
    """Experiments that cannot be resumed do not advise it."""

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (KeyboardInterrupt(), 130, "interrupted: nothing was kept\n"),
            (
                OSError(28, "No space left", "a"),
                1,
                "stopped: [Errno 28] No space left: 'a'. Mend this, then try again.\n",
            ),
        ],
    )
    def test_says_nothing_of_resume(self, error, code, line, capsys):
        assert main(EXPERIMENTS["spanning_tree"]._replace(run=raises(error)), []) == code
        assert capsys.readouterr().err == line


class TestOutput:
    @pytest.mark.parametrize("fails", ["write", "flush"])
    def test_an_output_that_cannot_be_written_is_a_warning_and_the_run_goes_on(
        self, fails, tmp_path, monkeypatch, capfd
    ):
        ended = []

        def run(query):
            for _ in range(3):
                print("some words", flush=True)
            return ended.append(True) or 0

        with open(tmp_path / "file", "w") as stream:
            failing = Failing(stream, fails)
            monkeypatch.setattr(sys, "stdout", failing)
            assert toy(run) == 0
            assert sys.stdout is failing
        assert ended == [True]
        assert capfd.readouterr().err == "warning: standard output is lost (broken pipe), and nothing more is shown\n"

    def test_a_closed_output_is_none_at_all(self, monkeypatch, capfd):
        monkeypatch.setattr(sys, "stdout", None)
        assert toy(lambda query: print("some words") or 0) == 0
        assert capfd.readouterr() == ("", "")

    def test_a_character_that_the_terminal_has_not_is_replaced(self, tmp_path, monkeypatch):
        with open(tmp_path / "file", "w", encoding="ascii") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert toy(lambda query: print("ε = 8") or 0) == 0
            assert stream.errors == "strict"
        assert (tmp_path / "file").read_text() == "? = 8\n"


def without_boxes(printed):
    """Words of tyro's help."""
    return " ".join(re.sub("│$|^│", " ", printed, flags=re.M).split())


class TestHelp:
    def test_of_options_presets_and_the_frame(self, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "100")
        assert toy(raises(ZeroDivisionError()), "--help-all", "--preset", "figure_2") == 0
        output = capsys.readouterr()
        assert output.err == ""
        printed = without_boxes(output.out)
        for text in (
            f"usage: {EXPERIMENT.command}",
            "would compare: step_size=0.1,0.2, each with fast=False,True, each with shape=circle,square",
            "--dataset STR Source of the data. (default: mnist)",
            "Side of a square, which needs it, and of a star. (default: 3.0)",
            "--rounds INT Number of rounds. Also --iterations, --num-rounds. (default: 20)",
            "--fast, --no-fast Or slow. (default: False)",
            "--preset STR NAME of a figure",
        ):
            assert text in printed
        titles = re.findall(r"^\W*([\w-]+) options ", output.out, flags=re.M)
        assert titles == ["drawing", "learning", "run", "every-experiment", "jobs-and-devices"]
        last = output.out.partition(" jobs-and-devices options ")[2]
        for option in ("launcher", "slurm-minutes", "coordinator", "devices", "lanes-at-once", "compilation-cache"):
            assert f"--{option} " in last


class TestCompilationCache:
    @pytest.mark.parametrize("arguments", [["--compilation-cache", "DIR"], ["--fast", "--compilation_cache=DIR"]])
    def test_a_folder(self, arguments, tmp_path):
        folders = []
        arguments = [argument.replace("DIR", str(tmp_path)) for argument in arguments]
        keep = lambda query: folders.append(getattr(jax.config, "jax_compilation_cache_dir")) or 0  # noqa: B009, E731
        assert toy(keep, *arguments) == 0
        assert Path(folders[0]).parent == tmp_path

    def test_off(self):
        settings = []
        keep = lambda query: settings.append(getattr(jax.config, "jax_enable_compilation_cache")) or 0  # noqa: B009, E731
        assert toy(keep, "--compilation-cache=off") == 0
        assert settings == [False]


def test_run_directories_are_numbered_when_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in ("a", "a-2", "a-3"):
        path = new_run_directory(None, "toy", "a", resume=False)
        assert path == Path("runs/toy") / expected
        assert not path.exists()
        path.mkdir(parents=True)
    assert new_run_directory(None, "toy", "a", resume=True) == Path("runs/toy/a-3")
    assert new_run_directory("b", "toy", "a", resume=True) == Path("b")
    assert new_run_directory("~/b", "toy", "a", resume=False) == Path.home() / "b"


class TestGraphFile:
    def test_matrices_are_used_as_given(self, tmp_path):
        first = graphs.star(4).mixing_matrix(0)
        second = graphs.directed_ring(4).mixing_matrix(0)
        np.save(tmp_path / "one.npy", first)
        np.save(tmp_path / "two.npy", np.stack([first, second]))
        np.testing.assert_array_equal(read_graph(str(tmp_path / "one.npy"), 4).mixing_matrices, first[None])
        read = read_graph(str(tmp_path / "two.npy"), 4)
        np.testing.assert_array_equal(read.mixing_matrices, [first, second])
        assert read.name == str(tmp_path / "two.npy")


class TestListing:
    def test_names_every_experiment_and_the_benchmarks(self, capsys):
        assert listing.main([]) == 0
        printed = "".join(capsys.readouterr().out.split())
        assert set(listing.commands()) == {*EXPERIMENTS, "bench", "plan", "report"}
        assert all(experiment.description[:30].replace(" ", "") in printed for experiment in EXPERIMENTS.values())

    @pytest.mark.parametrize(
        ("argument", "remedy"),
        [("privsgp_vr", "Write python -m experiments.privsgp_vr."), ("none", "Leave it out to see the list.")],
    )
    def test_takes_no_argument(self, argument, remedy, capsys):
        assert listing.main([argument]) == 2
        said = f"error: arguments: python -m experiments takes none; got {argument!r}. {remedy}\n"
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("experiment", "written", "meant"),
    [
        ("privsgp_vr", "--eps", "--target-epsilon"),
        ("privsgp_vr", "--lr", "--step-size"),
        ("privsgp_vr", "--epochs", "--iterations"),
        ("dzofl", "--wandb", "--track"),
        ("methods", "--algorithm", "--method"),
        ("ali_dpfl", "--workers", "--nodes"),
        ("ali_dpfl", "--epochs", "--local-steps"),
        ("embracing_fl", "--local-epochs", "--local-steps"),
    ],
)
def test_a_name_from_elsewhere_points_to_ours(experiment, written, meant):
    refused(lambda: command_line.parse(EXPERIMENTS[experiment], [written, "3"]), written, f"Did you mean {meant}?")


def test_names_of_the_planning_command_are_taken():
    """A plan's words become a run's."""
    words = "--method PrivSGP --sites 9 --batch 8 --rounds 30 --target 3 --delta 1e-4 --relation replace_one"
    other = "--nodes 9 --batch-size 8 --iterations 30 --target-epsilon 3 --dp-delta 1e-4 --neighboring-relation"
    ours, plans = (
        command_line.parse(EXPERIMENTS["privsgp_vr"], text.split())[0].config
        for text in (f"--method PrivSGP {other} replace_one", words)
    )
    assert ours == plans
    both = "--batch 8 --batch-size 9".split()
    refused(lambda: command_line.parse(EXPERIMENTS["privsgp_vr"], both), "batch_size", "must be given once")


@pytest.mark.parametrize(
    ("written", "meant"), [("MNIST", "mnist"), ("CIFAR-10", "cifar10"), ("FashionMNIST", "fashion_mnist")]
)
def test_a_data_set_by_its_usual_name_points_to_ours(written, meant):
    refused(lambda: load(written), "dataset", f"Did you mean {meant}?")
