"""The command line of any experiment: presets, --set, where a run goes, sentences and exit codes."""

import ast
import dataclasses
import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest

from experiments import __main__ as listing
from experiments import privsgp_vr
from experiments.command_line import Preset, new_run_directory, parse, read_graph, run_command_line
from experiments.privsgp import build, spending
from experiments.privsgp import config as config_of
from jaxfl import graphs
from jaxfl.core import ArgumentError
from jaxfl.training import Diverged, FatalCount


@dataclasses.dataclass(frozen=True)
class Toy:
    """Options of every kind."""

    num_rounds: int = 10
    """How long."""
    rate: float | Literal["theory"] = 0.5
    """How fast."""
    sizes: tuple[int, ...] | None = None
    """Of what."""
    name: str = "toy"
    """Called what."""
    fast: bool = False
    """Or slow."""


PRESETS = {"figure_1": Preset("the first figure", "3 s on two cores", {"num_rounds": 7, "sizes": (1, 2)})}


def toy(arguments):
    return parse(arguments.split() if isinstance(arguments, str) else arguments, Toy, PRESETS)


def main(run, argv=(), **options):
    return run_command_line(run, Toy, PRESETS, prog="toy", description="A toy.", argv=list(argv), **options)


def setting_of_jax(name):
    return getattr(jax.config, name)


def raises(error):
    """A run that ends with an exception."""

    def run(config, preset):
        raise error

    return run


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ("", Toy()),
            ("--num-rounds 3 --fast", Toy(num_rounds=3, fast=True)),
            ("--num_rounds=3", Toy(num_rounds=3)),
            ("--rate theory --sizes 4 5", Toy(rate="theory", sizes=(4, 5))),
            ("--rate -1e-3 --sizes -4 -5", Toy(rate=-1e-3, sizes=(-4, -5))),
            ("--set num-rounds=3 --set name=x", Toy(num_rounds=3, name="x")),
            ("--set=num_rounds=3 --rate 2", Toy(num_rounds=3, rate=2.0)),
            ("--set fast=true", Toy(fast=True)),
            ("--set fast=false", Toy()),
            ("--set sizes=None", Toy()),
            (["--set", "sizes=1 32", "--set", "name=a b = c"], Toy(sizes=(1, 32), name="a b = c")),
        ],
    )
    def test_values(self, arguments, expected):
        assert toy(arguments) == (expected, None)

    def test_preset_is_a_default(self):
        assert toy("--preset figure_1") == (Toy(num_rounds=7, sizes=(1, 2)), "figure_1")
        assert toy("--preset=figure_1") == toy("--preset figure_1")

    @pytest.mark.parametrize("arguments", ["--num-rounds 9 --preset figure_1", "--preset figure_1 --set num_rounds=9"])
    def test_explicit_option_wins_over_preset(self, arguments):
        assert toy(arguments) == (Toy(num_rounds=9, sizes=(1, 2)), "figure_1")

    @pytest.mark.parametrize(
        ("arguments", "argument", "says"),
        [
            ("--num-rounds x", "num_rounds", "must be an integer; got 'x'. Write for example --num-rounds 10, or"),
            ("--preset figure_1 --sizes x", "sizes", "must be an integer (or several) or None; got 'x'. Write for"),
            ("--preset figure_1 --sizes x", "sizes", "--sizes 1 2, or leave it out"),
            ("--rate x", "rate", "must be a number or theory; got 'x'."),
            ("--name", "name", "must be a text; got no value."),
            ("--fast=no", "fast", "takes no value; got 'no'. Write --fast alone"),
            ("--sises 3", "--sises", "there is none of that name. Did you mean --sizes?"),
            ("--rate 1 -- x", "rate", "got '1 -- x'"),
            ("stray --rate 1", "stray", "See --help"),
            ("--rate 1 --set rate=2", "rate", "must be given once; got '--rate 1' and '--rate 2'."),
            ("--set fast=maybe", "--set", "true or false; got 'fast=maybe'."),
            ("--set", "--set", "got ''. Keys: num_rounds, rate, sizes, name, fast."),
            ("--preset figure_2", "--preset", "got 'figure_2'. This experiment has: figure_1."),
        ],
    )
    def test_bad_options(self, arguments, argument, says, capsys):
        with pytest.raises(ArgumentError) as caught:
            toy(arguments)
        assert caught.value.argument == argument
        assert says in str(caught.value)
        assert capsys.readouterr() == ("", "")


class TestExitCodes:
    def test_finished(self):
        seen = []
        assert main(lambda *arguments: seen.append(arguments), ["--rate", "2", "--preset", "figure_1"]) == 0
        assert seen == [(Toy(num_rounds=7, rate=2.0, sizes=(1, 2)), "figure_1")]

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (ArgumentError("num_rounds", "must fit", "got 9", "Pass 3."), 2, "error: --num-rounds: must fit; got 9."),
            (ArgumentError("count", "must fit", "got\n9", "Pass 3."), 2, "error: --num-rounds: must fit; got 9. Pass"),
            (ArgumentError("other", "must fit", "got 9", "Pass 3."), 2, "error: other: must fit; got 9. Pass 3."),
            (
                Diverged("A", 3, "loss", rounds=(1, 9), first_round=4, node=2, value=float("nan")),
                1,
                "stopped: loss: must stay finite; got nan at node 2 in round 4 (rounds 1 to 9 of A, seed 3). Use",
            ),
            (FatalCount("3 batches overflowed.", (1, 5)), 1, "stopped: 3 batches overflowed."),
            (MemoryError(), 1, "stopped: the memory is exhausted. Take"),
            (
                jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
                1,
                "stopped: the mem",
            ),
            (OSError(28, "No space left on device", "a/b"), 1, "stopped: [Errno 28] No space left on device: 'a/b'."),
            (KeyboardInterrupt(), 130, "interrupted: the same command with --resume goes on"),
        ],
    )
    def test_code_and_one_line(self, error, code, line, capsys):
        assert main(raises(error), aliases={"count": "num_rounds"}) == code
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith(line)
        assert output.err.count("\n") == 1

    @pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), jax.errors.JaxRuntimeError("INTERNAL: a bug")])
    def test_bugs_keep_their_trace(self, error):
        with pytest.raises(type(error), match="a bug"):
            main(raises(error))

    def test_warnings_are_lines(self, capsys):
        def run(config, preset):
            warnings.simplefilter("always")
            warnings.warn("beware", stacklevel=1)

        show, filters = warnings.showwarning, list(warnings.filters)
        assert main(run) == 0
        assert capsys.readouterr().err == "warning: beware\n"
        assert warnings.showwarning is show
        assert warnings.filters == filters

    def test_help(self, capsys):
        assert main(raises(ZeroDivisionError()), ["--help"]) == 0
        output = capsys.readouterr()
        for text in ("toy", "--num-rounds", "How long.", "--preset NAME", "--set KEY=VALUE"):
            assert text in output.out
        assert output.err == ""

    def test_list_presets(self, capsys):
        assert main(raises(ZeroDivisionError()), ["--list-presets"]) == 0
        printed = capsys.readouterr().out
        assert all(text in printed for text in ("figure_1", "the first figure", "3 s on two cores"))


class TestCompilationCache:
    @pytest.mark.parametrize("arguments", [["--compilation-cache", "DIR"], ["--fast", "--compilation_cache=DIR"]])
    def test_every_experiment_has_the_option(self, arguments, tmp_path):
        seen = []

        def run(config, preset):
            seen.append((config, setting_of_jax("jax_compilation_cache_dir")))

        arguments = [argument.replace("DIR", str(tmp_path)) for argument in arguments]
        assert main(run, arguments) == 0
        ((config, folder),) = seen
        assert Path(folder).parent == tmp_path
        assert config == Toy(fast="--fast" in arguments)

    def test_off(self):
        seen = []

        def run(config, preset):
            seen.append(setting_of_jax("jax_enable_compilation_cache"))

        assert main(run, ["--compilation-cache=off"]) == 0
        assert seen == [False]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("--compilation-cache", "must have one value; got ''"),
            ("--compilation-cache --fast", "must have one value; got ''"),
            ("--compilation-cache a b", "must have one value; got 'a b'"),
            ("--compilation-cache a --compilation-cache=b", "must be given once; got 'a' and 'b'. Remove one of them."),
        ],
    )
    def test_bad_values(self, arguments, says, capsys):
        assert main(raises(ZeroDivisionError()), arguments.split()) == 2
        assert capsys.readouterr().err.startswith(f"error: --compilation-cache: {says}")

    def test_help_names_it(self, capsys):
        assert main(raises(ZeroDivisionError()), ["--help"]) == 0
        assert "--compilation-cache off" in " ".join(capsys.readouterr().out.split())


class TestRunDirectory:
    def test_numbered_when_taken(self, tmp_path, monkeypatch):
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

    @pytest.mark.parametrize(
        ("write", "says"),
        [
            (lambda path: np.savez(path.with_suffix(""), np.eye(2)), "an archive of several arrays"),
            (lambda path: np.save(path, np.array([{}]), allow_pickle=True), "array of numbers"),
            (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00v\x00"), "array of numbers"),
            (lambda path: np.save(path, np.array([["a"]])), "entries of type"),
            (lambda path: np.save(path, np.float32(1.0)), "shape ()"),
            (lambda path: path.mkdir(), "is a directory"),
        ],
    )
    def test_other_files_are_refused(self, write, says, tmp_path):
        write(tmp_path / "graph.npy")
        if (tmp_path / "graph.npz").exists():
            (tmp_path / "graph.npz").rename(tmp_path / "graph.npy")
        with pytest.raises(ArgumentError, match="graph: ") as caught:
            read_graph(str(tmp_path / "graph.npy"), 1)
        assert says in caught.value.found


class TestListing:
    def test_names_every_experiment(self, capsys):
        assert listing.main([]) == 0
        printed = capsys.readouterr().out
        for name in listing.EXPERIMENTS:
            assert name in printed
            assert importlib.util.find_spec(f"experiments.{name}") is not None

    @pytest.mark.parametrize(
        ("argument", "remedy"),
        [("privsgp_vr", "Write python -m experiments.privsgp_vr."), ("none", "Leave it out to see the list.")],
    )
    def test_takes_no_argument(self, argument, remedy, capsys):
        assert listing.main([argument]) == 2
        assert capsys.readouterr().err == (
            f"error: arguments: python -m experiments takes none; got {argument!r}. {remedy}\n"
        )


class TestOptionsOfPrivSGP:
    def test_every_option_is_read(self):
        reads = set(config_of.AXES) | {
            node.attr
            for module in (privsgp_vr, build, spending, config_of)
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config"
        }
        assert {field.name for field in dataclasses.fields(privsgp_vr.Config)} <= reads

    @pytest.mark.parametrize("name", list(privsgp_vr.PRESETS))
    def test_presets_give_a_configuration(self, name):
        config, preset = parse(["--preset", name], privsgp_vr.Config, privsgp_vr.PRESETS)
        assert preset == name
        for key, value in privsgp_vr.PRESETS[name].options.items():
            assert getattr(privsgp_vr.resolve(config), key) == value

    def test_help_describes_every_option(self, capsys):
        assert privsgp_vr.main(["--help"]) == 0
        printed = capsys.readouterr().out
        for field in dataclasses.fields(privsgp_vr.Config):
            assert f"--{field.name.replace('_', '-')}" in printed
        assert ".npy" in printed

    def test_list_presets(self, capsys):
        assert privsgp_vr.main(["--list-presets"]) == 0
        printed = "".join(capsys.readouterr().out.split())
        for name, preset in privsgp_vr.PRESETS.items():
            assert name in printed
            assert preset.cost.split()[0] in printed
