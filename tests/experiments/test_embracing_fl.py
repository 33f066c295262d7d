"""The experiment end to end through its command line, every method with a model, what is measured."""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leave_undrawn
from run_files import run_lines

from experiments.embracing_fl import EXPERIMENT, methods, networks, options
from experiments.embracing_fl.options import Configuration
from experiments.embracing_fl.prepare import prepare
from jaxfl.core import ArgumentError
from jaxfl.data import from_arrays
from jaxfl.frame import main
from jaxfl.frame.command_line import parse

TINY = "--rounds 4 --evaluate-every 2 --hidden 6 5 --local-steps 2 --batch-size 4 --quiet".split()
CASES = ("case 9 embracing", "case 9 width_reduction", "2 strong fed_avg")


def run(arguments):
    """Exit code and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        code = main(EXPERIMENT, arguments)
    return code, printed.getvalue()


def configs(arguments):
    """Name -> configuration."""
    return {name: line.config for name, line in parse(EXPERIMENT, arguments.split())[0].rows.items()}


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())["cases"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The default run, reduced: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    quarter = ["--seeds", "0", "1", "--participation-rate", "0.25"]
    code, printed = run([*TINY, *quarter, "--target-accuracy", "0.05", "--out", str(folder)])
    assert code == 0
    return folder, printed


class TestFinishedRun:
    def test_summary_has_what_clients_cost(self, finished):
        cases = summary_of(finished[0])
        assert tuple(cases) == CASES
        strong, whole, last = 64 * 6 + 6 + 6 * 5 + 5 + 5 * 10 + 10, 6 + 5 + 10, 5 * 10 + 10
        row = cases["case 9 embracing"]
        assert row["clients"] == {"strong": 2, "moderate": 4, "weak": 10}
        assert row["trained_params"] == {"strong": strong, "moderate": 95, "weak": last}
        assert row["capacity"]["weak"] == pytest.approx((last + 10) / (strong + whole), rel=1e-12)
        assert row["capacity"]["average"] == pytest.approx((2 * 1.0 + 4 * 0.22 + 10 * 0.14) / 16, rel=1e-12)
        assert set(row["device_seconds_per_round"]["weak"]) == {"forward", "backward", "io", "communication"}
        assert cases["2 strong fed_avg"]["clients"] == {"strong": 2, "moderate": 0, "weak": 0}
        assert list(cases["2 strong fed_avg"]["trained_params"]) == ["strong"]

    def test_summary_has_bits_of_the_whole_model_down_and_of_blocks_up(self, finished):
        costs = summary_of(finished[0])["case 9 embracing"]["costs"]
        assert costs["bits_received"]["per_seed"] == [4 * 4 * 32 * 485] * 2  # rounds, active clients, the whole model
        assert all(sent < 4 * 4 * 32 * 485 for sent in costs["bits_sent"]["per_seed"])

    def test_rounds_to_the_target_are_the_first_evaluations_that_reach_it(self, finished):
        lines = run_lines(finished[0])
        for name, row in summary_of(finished[0]).items():
            assert row["target_accuracy"] == 0.05
            for seed, reached in enumerate(row["rounds_to_target"]["per_seed"]):
                of_lane = [line for line in lines if (line["case"], line["seed"]) == (name, seed)]
                before = [line for line in of_lane if reached is None or line["round"] < reached]
                assert all(line["test_accuracy"] < 0.05 for line in before)
                assert reached is None or of_lane[len(before)]["test_accuracy"] >= 0.05


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("embracing", "resnet8 --resnet-widths 5 10 --resnet-blocks 1 1 --cut-weak dense"),
        ("embracing", "bilstm --frozen-words 5"),
        ("ordered_dropout", "resnet8 --resnet-widths 5 10 --resnet-blocks 1 1"),
        ("width_reduction", "femnist_cnn"),
        ("random_blocks", "bilstm"),
        ("first_half", "mlp --classifier"),
        ("fed_avg", "mlp"),
    ],
)
@pytest.mark.quick_cases(1)
def test_methods_build_with_models(method, model, monkeypatch):
    """Traced, not compiled: a round keeps the state's structure, and the full task evaluates it."""
    (config,) = configs(f"--method {method} --model {model}").values()
    inputs = np.zeros((64, 12), np.int32) if "bilstm" in model else np.zeros((64, 8, 8, 1), np.float32)
    dataset = from_arrays(inputs, np.arange(64) % 2, inputs[:2], [0, 1])
    monkeypatch.setattr(Configuration, "problem", lambda self: networks.problem_of(dataset, self.network.model))
    indices = jnp.arange(64).reshape(16, 4)[: sum(config.counts)]
    data = config.clients.data(config.data, sum(config.counts), (0,))(0)
    data = data._replace(
        inputs=jnp.asarray(inputs), labels=jnp.arange(64) % 2, indices=indices, sizes=data.sizes * 0 + 4
    )
    algorithm, key = config.algorithm(), jax.eval_shape(lambda: jax.random.key(0))
    before = jax.eval_shape(lambda k: algorithm.init(k, data), key)
    after, _ = jax.eval_shape(algorithm.round, key, before, data)
    assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(lambda leaf: leaf.shape, before)
    node = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), jax.eval_shape(algorithm.node_params, before)
    )
    assert set(jax.eval_shape(config.task().metrics, node, inputs[:2], np.array([0, 1]))) == {"loss", "accuracy"}


@pytest.mark.slow
def test_weak_clients_of_the_lstm_train_a_task_of_their_own(monkeypatch):
    """Both tasks have the same losses, with other gradients of the LSTM; moderate clients train the common one."""
    given = {}
    monkeypatch.setattr(options, "embracing", lambda task, **options: given.update(options, task=task))
    monkeypatch.setattr(Configuration, "problem", lambda self: networks.Problem((12,), 2))
    small = "--frozen-words 5 --embedding-features 3 --units 2 --dropout 0"
    (config,) = configs(f"--model bilstm --method embracing {small}").values()
    config.algorithm()
    common, moderate, weak = given["class_tasks"]
    assert common is moderate is given["task"]
    params = common.init(jax.random.key(0))
    words, labels = np.arange(24, dtype=np.int32).reshape(2, 12), np.array([0, 1])
    (loss, slopes), (other_loss, others) = (
        jax.value_and_grad(lambda p, task=task: task.loss(p, words, labels).sum())(params) for task in (common, weak)
    )
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    assert np.abs(slopes["lstm"]["kernel"] - others["lstm"]["kernel"]).max() > 1e-6


def test_static_statistics_are_measured_on_training_samples():
    """Only lines without tracked statistics measure them."""
    widths = "--model resnet8 --resnet-widths 5 6 7 --calibration-samples 70"
    grids = "--grid method=embracing,width_reduction --grid batch_norm=static,global"
    lines = parse(EXPERIMENT, f"{widths} {grids}".split())[0].rows
    for name, case in prepare(lines).cases.items():
        assert list(case.measures) == (["test"] if name.endswith(", static") else [])
        for measure in case.measures.values():
            _, calibration = measure.prepare(jax.random.key(0), case.data(0))
            assert int(calibration.weights.sum()) == 70


def test_step_sizes_share_a_program_and_cases_do_not():
    prepared = prepare(parse(EXPERIMENT, "--method embracing --grid case=7,9 --grid step_size=0.1,0.2".split())[0].rows)
    cases = list(prepared.cases.values())
    assert [case.numbers for case in cases] == [{"step_size": 0.1}, {"step_size": 0.2}] * 2
    assert cases[0].algorithm is cases[1].algorithm is not cases[2].algorithm
    for name in ("data", "task", "test"):
        assert getattr(cases[0], name) is getattr(cases[1], name)


def test_all_seeds_run_the_same_programs():
    """Index tables of different partitions are padded to one length; sizes stay their own."""
    lines = parse(EXPERIMENT, [])[0].rows
    cases = prepare(lines).cases
    first, second = (cases["case 9 embracing"].data(seed) for seed in (0, 1))
    assert first.indices.shape == second.indices.shape
    assert first.sizes.tolist() != second.sizes.tolist()
    assert cases["2 strong fed_avg"].data(0).sizes.tolist() == first.sizes[:2].tolist()
    assert cases["case 9 embracing"].data is cases["case 9 width_reduction"].data


def test_the_step_size_falls_after_its_rounds():
    """Also where it is traced."""

    def rate(value, round_index):
        schedule = methods.decayed(value, (4, 8))
        assert callable(schedule)
        return schedule(round_index)

    rates = jax.jit(jax.vmap(rate, (None, 0)))(0.5, jnp.array([0, 3, 4, 7, 8, 9], jnp.int32))
    np.testing.assert_allclose(rates, [0.5, 0.5, 0.05, 0.05, 0.005, 0.005], rtol=1e-6)
    assert methods.decayed(0.5, ()) == 0.5


def test_the_masked_loss_is_that_of_a_line_of_numpy():
    """In float64; classes that the client lacks have no gradient, and test samples, with labels alone, no mask."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(4, 5)), np.array([1, 3, 1, 4])
    table = np.array([[1, *np.isin(np.arange(5), own)] for own in ((1, 2), (0, 3), (1,), range(5))], np.int32)
    table[:, 0] = labels
    z = np.where(table[:, 1:], logits, 0.0)
    expected = np.log(np.exp(z).sum(axis=1)) - z[np.arange(4), labels]
    values = jnp.asarray(logits, jnp.float32)
    np.testing.assert_allclose(methods.masked_cross_entropy(values, jnp.asarray(table)), expected, rtol=1e-6)
    slopes = jax.grad(lambda z: methods.masked_cross_entropy(z, jnp.asarray(table)).sum())(values)
    np.testing.assert_array_equal(slopes != 0, table[:, 1:] > 0)
    plain = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(4), labels]
    np.testing.assert_allclose(methods.masked_cross_entropy(values, jnp.asarray(labels)), plain, rtol=1e-6)


def test_the_masked_loss_is_an_axis_and_needs_a_logit_for_each_class():
    rows = parse(EXPERIMENT, "--method embracing --grid masked_loss=true,false".split())[0].rows
    assert [row.config.learning.masked_loss for row in rows.values()] == [True, False]
    rows = parse(EXPERIMENT, "--dataset imdb --method embracing --masked-loss".split())[0].rows
    with pytest.raises(ArgumentError, match=r"masked_loss.*bilstm"):
        prepare(rows)


@pytest.mark.parametrize("method", ["embracing", "width_reduction"])
@pytest.mark.quick_cases(1)
def test_the_masked_loss_takes_each_clients_classes_and_is_plain_where_they_have_all(method):
    common = f"--method {method} --nodes 4 --strong 2 --weak 2 --num-active 4 --local-steps 1"

    def case(more):
        (case,) = prepare(parse(EXPERIMENT, f"{common} {more}".split())[0].rows).cases.values()
        return case

    data, plain = case("--alpha 0.1 --masked-loss").data(0), case("--alpha 0.1").data(0)
    for indices, size in zip(plain.indices, plain.sizes, strict=True):
        own = np.asarray(plain.labels)[indices[:size]]
        np.testing.assert_array_equal(np.asarray(data.labels)[indices[:size], 0], own)
        assert (np.asarray(data.labels)[indices[:size], 1:] == np.isin(np.arange(10), own)).all()
    losses = []
    for more in ("--alpha 0.1", "--alpha 0.1 --masked-loss", "--alpha 1e5", "--alpha 1e5 --masked-loss"):
        one, key = case(more), jax.random.key(1)
        learner, data = one.algorithm({name: jnp.float32(number) for name, number in one.numbers.items()}), one.data(0)
        losses.append(learner.round(key, learner.init(key, data), data)[1].loss)
    assert losses[0] != losses[1]
    assert losses[2] == losses[3]
