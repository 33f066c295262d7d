"""Noise and batches of each point are its own, the key can stay secret, and what is published is what is covered."""

import dataclasses
import itertools
import json
import re
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flat, refused
from run_files import content
from toy_problem import toy_test

import jaxfl
from jaxfl import core, training
from jaxfl.core import Purpose, purpose_key, run_key
from jaxfl.core.keys import SHARED, digest
from jaxfl.privacy.statements import SECRET, SIMULATED, caption
from jaxfl.training import open_run, publish, read_run, restore_state, secret_key, train

NUM_NODES, FEATURES, SAMPLES = 2, 2000, 12
TASK = core.from_functions(
    lambda key: jax.random.normal(key, (FEATURES,)),
    lambda params, inputs, labels: jnp.zeros(inputs.shape[0]) * params.sum(),  # no gradient: what moves is noise
    lambda params, inputs, labels: {"accuracy": jnp.zeros(inputs.shape[0]) * params.sum()},
)
GRAPH = jaxfl.graphs.complete(NUM_NODES)
STATEMENT = {"bound": "proven", "dp_epsilon": 1.5, "dp_delta": 1e-5, "neighboring_relation": "zero_out"}


def data_of(seed):
    parts = [range(0, SAMPLES // 2), range(SAMPLES // 2, SAMPLES)]
    return jaxfl.federate(np.ones((SAMPLES, 1), np.float32), np.zeros(SAMPLES, np.int32), list(map(list, parts)))


def algorithm_of(numbers):
    gradient = jaxfl.mini_batch(sampler=jaxfl.gradients.fixed(3), clip_norm=1.0)
    return jaxfl.push_sum(
        TASK, graph=GRAPH, gradient=gradient, noise=jaxfl.gaussian(numbers["noise_std"]), step_size=1.0
    )


def case(noise_std, **fields):
    """Rounds of nothing but noise."""
    settings = {
        "settings": {"noise_std": noise_std},
        "privacy": lambda rounds: [STATEMENT],
        "final_params_are_private": True,
    }
    shared = {"task": TASK, "test": toy_test(), "data": data_of, "num_rounds": 2, "evaluate_every": 2, "seeds": (0,)}
    return training.Case(algorithm=algorithm_of, numbers={"noise_std": noise_std}, **{**shared, **settings, **fields})


def trained(out, cases, **options):
    """(run directory, case -> what noise added to the first node's parameters, in units of it)."""
    run = open_run(out, {})
    train(cases, run=run, quiet=True, **options)
    return run, {name: noise_of(run, name, cases[name]) for name in cases}


def noise_of(run, name, of, seed=0):
    start = flat(TASK.init(purpose_key(jax.random.key(seed), Purpose.INIT)))
    state = restore_state(run, name, of, seed)[1]
    return (np.asarray(algorithm_of(of.numbers).node_params(state))[0] - start) / of.numbers["noise_std"]


def correlated(first, second):
    """True if two rows of normal numbers have more than five standard errors of correlation."""
    return abs(np.corrcoef(first, second)[0, 1]) > 5 / np.sqrt(len(first))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("both"), {"A": case(0.1), "B": case(0.2)})


def test_points_of_one_program_have_independent_noise_and_the_same_start(both):
    _, moved = both
    assert not correlated(*moved.values())
    # The same start: what is left of it is noise of the scale that was asked for, two rounds over two nodes.
    for row in moved.values():
        assert np.std(row) == pytest.approx(1.0, rel=0.1)


def test_points_of_several_runs_have_independent_noise(both, tmp_path):
    other = trained(tmp_path / "C", {"C": case(0.4)})[1]["C"]
    assert not any(correlated(other, row) for row in both[1].values())


def test_an_identity_goes_before_the_name(tmp_path):
    same = trained(tmp_path / "same", {"first": case(0.1, identity={"point": 1})})[1]["first"]
    assert correlated(same, trained(tmp_path / "again", {"second": case(0.1, identity={"point": 1})})[1]["second"])
    other = trained(tmp_path / "other", {"first": case(0.1, identity={"point": 2})})[1]["first"]
    assert not correlated(same, other)


def erased(seed):
    """The data without one sample: zeros in its place."""
    data = data_of(seed)
    return data._replace(inputs=jnp.asarray(data.inputs).at[3].set(0.0))


def test_runs_on_data_that_differ_in_one_sample_have_independent_noise(both, tmp_path):
    """Their difference would tell the sample."""
    other = trained(tmp_path / "erased", {"A": case(0.1, data=erased)})[1]["A"]
    assert not correlated(other, both[1]["A"])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data": erased}, "data.0"),
        ({"data": lambda seed: data_of(seed)._replace(indices=data_of(seed).indices[::-1])}, "data.0"),
        ({"test": jax.tree.map(jnp.zeros_like, toy_test())}, "data.test"),
    ],
)
def test_a_resume_on_other_data_is_refused(tmp_path, changes, name):
    """Pool, partition and test set; nothing of the run changes."""
    trained(tmp_path / "run", {"A": case(0.1)})
    before = content(tmp_path / "run")
    run = open_run(tmp_path / "run", {}, resume=True)
    refused(
        lambda: train({"A": case(0.1, **changes)}, run=run, quiet=True),
        f"cases.A.{name}",
        "as in the run that is resumed",
    )
    assert before == content(tmp_path / "run")


class TestDigestOfTheData:
    """Whoever has all samples but one tries values for the last one against a digest (findings on config.json)."""

    def candidates(self):
        return {value: data_of(0)._replace(inputs=data_of(0).inputs.at[3].set(value)) for value in (0.0, 0.5, 1.0)}

    def matching(self, run):
        """The values of the unknown sample that some file of the run confirms."""
        files = [file.read_bytes() for file in run.path.rglob("*") if file.is_file() and file.parent.name != "private"]
        forms = {value: [text := digest(data), bytes.fromhex(text)] for value, data in self.candidates().items()}
        forms = {value: [text.encode(), raw] for value, (text, raw) in forms.items()}
        return [value for value, each in forms.items() if any(form in held for held in files for form in each)]

    def test_a_file_confirms_no_guess_where_the_seed_is_secret(self, tmp_path):
        data = {"data": lambda seed: self.candidates()[1.0]}
        assert self.matching(trained(tmp_path / "public", {"A": case(0.1, **data)})[0]) == [1.0]
        secret = open_run(tmp_path / "secret", {})
        train({"A": case(0.1, **data)}, run=secret, quiet=True, key=secret_key(secret))
        assert self.matching(secret) == []

    def test_the_same_data_resume_and_others_are_named_in_words(self, tmp_path):
        run = open_run(tmp_path / "run", {})
        train({"A": case(0.1)}, run=run, quiet=True, key=secret_key(run))
        before = content(tmp_path / "run")
        run = open_run(tmp_path / "run", {}, resume=True)
        train({"A": case(0.1)}, run=run, quiet=True, key=secret_key(run))
        with pytest.raises(core.ArgumentError, match="the training data of case A, seed 0, are other data") as actual:
            train({"A": case(0.1, data=erased)}, run=run, quiet=True, key=secret_key(run))
        assert not re.search("[0-9a-f]{32}", str(actual.value).replace(str(run.path), ""))
        other = case(0.1, test=jax.tree.map(jnp.zeros_like, toy_test()))
        with pytest.raises(core.ArgumentError, match="the test data of case A are other data"):
            train({"A": other}, run=run, quiet=True, key=secret_key(run))
        assert before.keys() == content(tmp_path / "run").keys()


class TestRunKey:
    def test_runs_of_the_same_base_key_start_from_the_same_parameters(self):
        keys = [run_key(jax.random.key(3), {"step_size": step}, "") for step in (0.1, 0.2)]
        for purpose in SHARED:
            assert (purpose_key(keys[0], purpose) == purpose_key(keys[1], purpose)).all()
            assert (purpose_key(keys[0], purpose) == purpose_key(jax.random.key(3), purpose)).all()

    def test_runs_with_different_settings_have_independent_batches_and_noise(self):
        settings = [{}, {"a": 1}, {"a": 2}, {"a": 1, "b": None}, {"a": "1"}, {"b": 1}, {"a": [1]}, {"a": True}]
        for purpose in set(Purpose) - SHARED:
            drawn = [
                jax.random.normal(purpose_key(run_key(jax.random.key(0), each, ""), purpose, 1), (2000,))
                for each in settings
            ]
            assert not any(correlated(*pair) for pair in itertools.combinations(drawn, 2))

    def test_runs_on_different_data_have_independent_batches_and_noise(self):
        keys = [run_key(jax.random.key(0), {}, data) for data in (data_of(0), erased(0))]
        assert (keys[0].own == run_key(jax.random.key(0), {}, digest(data_of(1))).own).all()
        for purpose in set(Purpose) - SHARED:
            assert not correlated(*(jax.random.normal(purpose_key(key, purpose, 1), (2000,)) for key in keys))
        refused(lambda: jax.jit(lambda data: run_key(jax.random.key(0), {}, data))(data_of(0)), "data", "traced")

    def test_the_order_of_settings_does_not_matter(self):
        first, second = (
            run_key(jax.random.key(0), dict(pairs), "") for pairs in itertools.permutations([("a", 1), ("b", 2)])
        )
        assert (first.own == second.own).all()

    def test_settings_that_json_cannot_hold_are_refused(self):
        refused(lambda: run_key(jax.random.key(0), {"task": object()}, ""), "settings", "JSON")

    def test_embedded_rounds_may_be_vmapped_over_runs(self):
        data, points = data_of(0), [{"noise_std": 0.1, "number": number} for number in range(3)]
        keys = jax.tree.map(
            lambda *halves: jnp.stack(halves), *(run_key(jax.random.key(0), point, data) for point in points)
        )

        @jax.jit
        @jax.vmap
        def moved(key):
            learner = algorithm_of({"noise_std": 0.1})
            state = learner.init(key, data)
            return state.params, learner.round(key, state, data)[0].params

        start, end = moved(keys)
        np.testing.assert_array_equal(start[0], start[1])
        noise = np.asarray(end - start)[:, 0]
        assert not any(correlated(*pair) for pair in itertools.combinations(noise, 2))


class TestSecretKey:
    def test_nobody_but_the_owner_reads_it_and_it_is_nowhere_else(self, tmp_path):
        run = open_run(tmp_path / "run", {})
        key = secret_key(run)
        path = tmp_path / "run" / "private" / "key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        trained_with = {"A": case(0.1)}
        train(trained_with, run=run, quiet=True, key=key)
        text = path.read_text().strip()
        others = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and file != path]
        assert others
        assert not any(text.encode() in file.read_bytes() for file in others)
        assert not correlated(noise_of(run, "A", trained_with["A"]), trained(tmp_path / "o", trained_with)[1]["A"])

    def test_a_resumed_run_has_the_same_one(self, tmp_path):
        first = secret_key(open_run(tmp_path / "run", {}))
        resumed = open_run(tmp_path / "run", {}, resume=True)
        assert (secret_key(resumed) == first).all()
        assert not (secret_key(open_run(tmp_path / "other", {})) == first).all()
        (tmp_path / "run" / "private" / "key").write_text("none")
        refused(lambda: secret_key(resumed), "seed_from_os", "private/key")

    def test_a_key_that_others_could_read_or_that_lies_elsewhere_is_refused(self, tmp_path):
        run = open_run(tmp_path / "run", {})
        secret_key(run)
        (run.path / "private" / "key").chmod(0o640)
        resumed = open_run(tmp_path / "run", {}, resume=True)
        with pytest.raises(core.ArgumentError, match=r"^seed_from_os: .* its owner only; it has mode 0640"):
            secret_key(resumed)
        other = open_run(tmp_path / "other", {})
        (other.path / "private").symlink_to(tmp_path)
        with pytest.raises(core.ArgumentError, match=r"^seed_from_os: .* in the run directory; it, or its folder"):
            secret_key(other)
        assert not (tmp_path / "key").exists()

    def test_a_run_that_is_refused_leaves_none(self, tmp_path):
        run = open_run(tmp_path / "run", {})
        secret_key(run)
        run.withdraw()
        assert not (tmp_path / "run").exists()


class TestPublish:
    def test_nothing_but_parameters_statements_and_options_that_vary_is_written(self, tmp_path):
        run, cases = open_run(tmp_path / "run", {}), {"A": case(0.1, seeds=(0, 1)), "B": case(0.2)}
        train(cases, run=run, quiet=True, key=secret_key(run))
        publish(run, cases, tmp_path / "out")
        files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
        parameters = {f"parameters/{name}.npz" for name in ("a/seed_0", "a/seed_1", "b/seed_0")}
        assert files == {"privacy.json", *parameters}
        published = json.loads((tmp_path / "out" / "privacy.json").read_text())
        (total,) = published["total"]  # of two seeds of A and one of B
        assert (total["neighboring_relation"], total["dp_epsilon"], total["runs"]) == ("zero_out", 3 * 1.5, 3)
        assert total["dp_delta"] == pytest.approx(3e-5)
        content = published["cases"]
        assert set(content["A"]) == {"settings", "rounds_per_seed", "privacy"}
        assert SECRET in content["A"]["privacy"][0]["assumptions"]
        with np.load(tmp_path / "out" / "parameters" / "a" / "seed_1.npz") as held:
            state = restore_state(run, "A", cases["A"], 1)[1]
            np.testing.assert_array_equal(held["params"], algorithm_of({"noise_std": 0.1}).node_params(state))

    def test_the_total_composes_what_the_learners_say(self, tmp_path):
        def account(dp_delta):
            return jaxfl.privacy.account(algorithm_of({"noise_std": 2.0}), data_of(0), dp_delta=dp_delta)

        def total(name, factor):
            def stated(rounds):
                return [{**STATEMENT, "dp_epsilon": factor * account(1e-5).epsilon(rounds)}]

            run, cases = open_run(tmp_path / name, {}), {"A": case(2.0, seeds=(0, 1, 2), privacy=stated)}
            train(cases, run=run, quiet=True, key=secret_key(run))
            publish(run, cases, tmp_path / f"{name}_out")
            return json.loads((tmp_path / f"{name}_out" / "privacy.json").read_text())["total"][0]

        actual, one = total("own", 1.0), account(1e-5).epsilon(2)
        assert actual["dp_epsilon"] == pytest.approx(account(3e-5).epsilon(6))
        assert actual["dp_epsilon"] < 0.8 * 3 * one
        assert (actual["dp_delta"], actual["runs"]) == (pytest.approx(3e-5), 3)
        assert "composed" in actual["accountant"]
        other = total("other", 1.5)  # a statement that is not the learner's
        assert other["dp_epsilon"] == pytest.approx(3 * 1.5 * one)
        assert "added up" in other["accountant"]

    def test_arrays_of_a_registered_class_have_their_names(self, tmp_path):
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Weights:
            kernel: jax.Array

        run, plain = open_run(tmp_path / "run", {}), case(0.1)
        train({"A": plain}, run=run, quiet=True, key=secret_key(run))

        def of_class(numbers):
            learner = algorithm_of(numbers)
            return learner._replace(node_params=lambda state: Weights(learner.node_params(state)))

        publish(run, {"A": plain._replace(algorithm=of_class)}, tmp_path / "out")
        with np.load(tmp_path / "out" / "parameters" / "a" / "seed_0.npz") as held:
            assert held.files == ["kernel"]
            assert held["kernel"].dtype == np.float32

    def test_nodes_with_budgets_of_their_own_are_added_up_one_by_one(self, tmp_path):
        def named(seed):
            parts = [np.arange(6), np.arange(6, 12)]
            return jaxfl.federate(data_of(0).inputs, np.zeros(SAMPLES, np.int32), parts, names=["north", "south"])

        def moved(seed):
            return named(seed)._replace(inputs=named(seed).inputs + seed)

        def stated(*epsilons):
            own = {"dp_epsilon": max(epsilons), "nodes": 2, "node_epsilons": epsilons}
            return lambda rounds: [{**STATEMENT, **own}]

        def total(name, data, **of_cases):
            run = open_run(tmp_path / name, {})
            shared = {"seeds": (0, 1), "data": data}
            cases = {label: case(0.1, privacy=of, **shared) for label, of in of_cases.items()}
            train(cases, run=run, quiet=True, key=secret_key(run))
            publish(run, cases, tmp_path / f"{name}_out")
            published = json.loads((tmp_path / f"{name}_out" / "privacy.json").read_text())
            own = json.loads((run.path / "privacy.json").read_text())
            assert {label: row["node_epsilons"] for label, row in published["cases"].items()} == own
            return published["total"][0]

        same = total("same", named, A=stated(1.0, 4.0))
        assert (same["dp_epsilon"], same["node_epsilons"], same["nodes"]) == (8.0, [2.0, 8.0], ["north", "south"])
        assert same["dp_delta"] == pytest.approx(2e-5)
        both = total("both", named, A=stated(1.0, 4.0), B=stated(5.0, 1.0))
        assert (both["dp_epsilon"], both["node_epsilons"]) == (12.0, [12.0, 10.0])  # not 18
        of_each_seed = total("of_each_seed", named, A=stated(1.0, 4.0, 2.0, 3.0))
        assert of_each_seed["node_epsilons"] == [4.0, 8.0]
        other = total("other", moved, A=stated(1.0, 4.0), B=stated(5.0, 1.0))
        assert (other["dp_epsilon"], other["runs"], "node_epsilons" in other) == (18.0, 4, False)

    def test_a_run_that_is_not_covered_is_refused(self, both, tmp_path):
        run, cases = open_run(tmp_path / "run", {}), {"A": case(0.1)}
        train(cases, run=run, quiet=True, key=secret_key(run))
        refused(lambda: publish(both[0], {"A": case(0.1)}, tmp_path / "out"), "publish", "public seed")
        uncovered = {"A": case(0.1, final_params_are_private=False)}
        refused(lambda: publish(run, uncovered, tmp_path / "out"), "publish", "no statement covers")
        summary = run.read_summary()
        for status in ("diverged", "stopped", "stopped_early"):  # which depend on what is measured without noise
            run.write_summary({**summary, "cases": {"A": {**summary["cases"]["A"], "status": [status]}}})
            refused(lambda: publish(run, cases, tmp_path / "out"), "publish", "measured without noise")
        summary["cases"]["A"]["privacy"][0]["dp_epsilon"] = None
        run.write_summary(summary)
        refused(lambda: publish(run, cases, tmp_path / "out"), "publish", "no proven epsilon")
        assert not (tmp_path / "out").exists()
        (tmp_path / "file").write_text("")
        refused(lambda: publish(run, cases, tmp_path), "publish", "empty folder")


def test_a_simulation_is_marked(both):
    row = read_run(both[0].path).read_summary()["cases"]["A"]
    assert SIMULATED in row["privacy"][0]["assumptions"]
    assert caption({"A": row["privacy"]})[-1] == "simulation: its seed is public"
    assert len(caption({"A": [STATEMENT]})) == 1


def test_the_epsilon_of_every_node_is_in_a_file_and_their_median_in_the_summary(tmp_path):
    """Two nodes in each of two partitions of the data have epsilons of their own."""
    own = {
        **STATEMENT,
        "observer": "all other nodes",
        "dp_epsilon": 4.0,
        "nodes": 2,
        "node_epsilons": (1.0, 2.0, 3.0, 4.0),
    }
    none = {**STATEMENT, "bound": "published", "dp_epsilon": None, "nodes": 2, "node_epsilons": ()}
    run = trained(tmp_path / "run", {"A": case(0.1, privacy=lambda rounds: [none, own])})[0]
    content = json.loads((run.path / "privacy.json").read_text())
    grounds = {"bound": "proven", "neighboring_relation": "zero_out", "dp_delta": 1e-5, "observer": "all other nodes"}
    assert content == {"A": [{**grounds, "node_epsilons": [[1.0, 2.0], [3.0, 4.0]]}]}
    published, proven = run.read_summary()["cases"]["A"]["privacy"]
    assert (proven["dp_epsilon"], proven["dp_epsilon_median_node"]) == (4.0, 2.5)
    assert not {"node_epsilons", "dp_epsilon_median_node"} & set(published)
    assert "node_epsilons" not in proven
