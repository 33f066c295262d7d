"""Methods over a graph: their papers' lines in float64, their invariants over 1,000 rounds, and what they become."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from problems import linear_task, problem, run, uneven_data
from reference import over_graphs as reference
from reference.runs import assert_same, by_node, each, entries, flat, one_by_one, plain_gradients

import jaxfl
from jaxfl import graphs, privacy
from jaxfl.channel import rand_k, top_k, uniform_quantizer

KEY, ROUNDS, MANY, STEP_SIZE, BATCH = jax.random.key(11), 40, 1000, 0.2, 2
RING = graphs.from_matrix(0.4 * np.eye(16) + 0.6 * graphs.ring(16).mixing_matrix(0))  # eigenvalues above -1/3


class Case(NamedTuple):
    """One method with one setting.

    Attributes:
        name: of its row.
        arguments: of its constructor, beside those of its example.
        reference: (x, W, g, gamma, rounds) -> x.
        invariant: (x (rounds + 1, n, d), memory by name) -> what must be 0 after each round, (rounds, d).
        draws: whether the reference also takes `drawn`, round -> what the method draws for itself.
        off: (arguments with which a round from the start is a round of the other learner, constructor, its arguments).
    """

    name: str
    arguments: dict[str, Any]
    reference: Callable
    invariant: Callable
    off: tuple[dict[str, Any], Callable, dict[str, Any]] | None = None
    draws: bool = False


def mean_moves_by(name):
    """The mean of x has moved by minus gamma times the sum of the means of a memory, of each round after it."""
    return lambda x, memory: (x[1:] - x[:1]).mean(1) + INVARIANT_STEP * np.cumsum(memory[name][1:].mean(1), axis=0)


def quasi_global(decay):
    """The sum over rounds of q+ - mu q is 1 - mu times the way of the mean, over gamma."""

    def error(x, memory):
        q = memory["momentum"].mean(1)
        return INVARIANT_STEP * np.cumsum(q[1:] - decay * q[:-1], axis=0) - (1 - decay) * (x[:1] - x[1:]).mean(1)

    return error


def sum_is_zero(x, memory):
    """The duals sum to 0."""
    return memory["dual"][1:].sum(axis=1)


def sums_agree(x, memory):
    """Trackers and gradients have one sum over the nodes; relative to their size."""
    size = max(np.abs(memory[name]).max() for name in ("tracker", "gradient"))
    return (memory["tracker"] - memory["gradient"])[1:].sum(axis=1) / size * np.abs(x).max()


INVARIANT_STEP = 0.02
BETA = {"momentum": 0.7}
AFTER_STEP = jaxfl.push_sum, {}  # D-PSGD that mixes after the step, where W is doubly stochastic
CASES = {
    "d_sgdm": Case(
        "d_sgdm",
        BETA,
        functools.partial(reference.d_sgdm, **BETA),
        mean_moves_by("momentum"),
        ({"momentum": 0.0}, *AFTER_STEP),
    ),
    "d_sgdm, as in the paper": Case(
        "d_sgdm",
        BETA | {"mixes_momentum": True},
        functools.partial(reference.d_sgdm, **BETA, mixes_momentum=True),
        mean_moves_by("momentum"),
    ),
    "qg_dsgdm": Case(
        "qg_dsgdm",
        BETA | {"memory_decay": 0.9},
        functools.partial(reference.qg_dsgdm, **BETA, memory_decay=0.9),
        quasi_global(0.9),
        ({"momentum": 0.0}, *AFTER_STEP),
    ),
}
DENSER = graphs.from_networkx(nx.circulant_graph(16, [1, 2, 3, 4]), weights="metropolis")  # gap 0.44
LAZY = graphs.from_matrix((np.eye(5) + graphs.ring(5).mixing_matrix(0)) / 2)
CASES |= {
    "exact_diffusion": Case(
        "exact_diffusion",
        {},
        functools.partial(reference.exact_diffusion, share=0.5),
        sum_is_zero,
        ({}, jaxfl.push_sum, {"graph": LAZY}),
    ),
    "d2": Case(
        "exact_diffusion",
        {"variant": "d2"},
        functools.partial(reference.exact_diffusion, share=1.0),
        sum_is_zero,
        ({}, *AFTER_STEP),
    ),
    "nids": Case(
        "nids",
        {},
        functools.partial(reference.exact_diffusion, share=0.5, mixes_first=False),
        sum_is_zero,
        ({}, jaxfl.d_psgd, {"graph": graphs.isolated(5)}),
    ),
    "extra": Case("extra", {}, reference.extra, sum_is_zero, ({}, jaxfl.d_psgd, {})),
}
CASES |= {
    "diging": Case(
        "diging",
        {},
        functools.partial(reference.tracking, mixes_after=False),
        sums_agree,
        ({}, jaxfl.d_psgd, {}),
    ),
    "atc_tracking": Case("atc_tracking", {}, reference.tracking, sums_agree, ({}, *AFTER_STEP)),
    "aug_dgm": Case("atc_tracking", {"variant": "aug_dgm"}, reference.aug_dgm, sums_agree, ({}, *AFTER_STEP)),
    "gt_saga": Case("gt_saga", {}, reference.gt_saga, sums_agree),
}
KEPT = 16  # of the 53 numbers of the small task
BY_SIZE = {"compressor": top_k(0.3), "consensus_step": 0.4}
AT_RANDOM = {"compressor": rand_k(0.3), "consensus_step": 0.4, "order": "iclr"}
ALL_OF_IT = {"compressor": top_k(1.0), "consensus_step": 1.0}
by_size = functools.partial(
    reference.choco_sgd, compress=lambda v, _: reference.kept(v, np.abs(v), KEPT), zeta=0.4, order="icml"
)
at_random = functools.partial(
    reference.choco_sgd, compress=lambda v, scores: reference.kept(v, scores, KEPT), zeta=0.4, order="iclr"
)
coin = {"exchange_probability": 0.6}
skips = functools.partial(reference.prox_skip, probability=0.6)
CASES |= {
    "choco_sgd": Case("choco_sgd", BY_SIZE, by_size, mean_moves_by("g"), (ALL_OF_IT, *AFTER_STEP), draws=True),
    "choco_sgd, rand-k and iclr": Case("choco_sgd", AT_RANDOM, at_random, mean_moves_by("g"), draws=True),
    "prox_skip": Case("prox_skip", coin, skips, sum_is_zero, draws=True),
}
LOCAL = {"num_local_steps": 3, "communication_step": 0.7}
CASES["k_gt"] = Case(
    "k_gt",
    LOCAL,
    functools.partial(reference.k_gt, num_steps=3, outer=0.7),
    lambda x, memory: memory["correction"][1:].sum(axis=1),
    ({"num_local_steps": 1, "communication_step": 1.0}, *AFTER_STEP),
)
LOSSY = {"links": jaxfl.links(0.7, uniform_quantizer(2.0**-10), symmetric=True)}
of_cases = pytest.mark.parametrize("case", CASES)


@of_cases
def test_follows_the_papers_lines(case):
    """To 1e-5 after 40 rounds with clipped gradients and noise, on the same draws."""
    c = CASES[case]
    p = problem(c.name)
    learner, graph = p.algorithm(batch_size=BATCH, clip_norm=0.7, **c.arguments), p.example.topology["graph"]
    rounds = one_by_one(learner, KEY, p.data, ROUNDS)
    gradients, start = plain_gradients(p.data, BATCH, 0.7, 2), rounds.states[0].params
    num_steps = c.arguments.get("num_local_steps", 1)
    leaves, structure = jax.tree.flatten(start)

    def drawn_in(step):
        draws = rounds.draws[step // num_steps]
        of_round = draws.gradient, draws.noise
        return of_round if num_steps == 1 else jax.tree.map(lambda leaf: leaf[:, step % num_steps], of_round)

    def g(k, x):
        places = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
        parts = [part.reshape(leaf.shape) for part, leaf in zip(np.split(x, places, axis=1), leaves, strict=True)]
        drawn, noise = drawn_in(k)
        used = zip(each(structure.unflatten(parts)), entries(drawn), strict=True)
        of_nodes = [flat(gradients[i](one, batch)) for i, (one, batch) in enumerate(used)]
        return np.stack(of_nodes) + by_node(noise)

    drawn = {"drawn": lambda k: np.asarray(rounds.draws[k].rule)} if c.draws else {}
    expected = c.reference(by_node(start), graph.mixing_matrix, g, STEP_SIZE, ROUNDS, **drawn)
    error = np.abs(by_node(rounds.states[-1].params) - expected).max() / np.abs(expected).max()
    print(f"{case}: error of the lines {error:.1e}")
    assert error < 1e-5


@pytest.mark.parametrize(
    ("case", "over"),
    [(case, {}) for case in CASES] + [(case, LOSSY) for case in ("qg_dsgdm", "d2", "nids", "aug_dgm", "k_gt")],
)
def test_the_invariant_holds_over_1000_rounds(case, over):
    """In float32, 16 nodes with uneven data and random batches; relative to the largest |value| of x. Also over links
    that round, and that lose messages of two nodes together."""
    c = CASES[case]
    data = uneven_data(sizes=tuple(4 + i % 5 for i in range(16)), classes=5)
    task, estimator = linear_task(), jaxfl.mini_batch(BATCH)
    arguments = c.arguments | over | {"graph": RING, "step_size": INVARIANT_STEP, "gradient": estimator}
    learner, steps = problem(c.name).row.constructor(task, **arguments), c.arguments.get("num_local_steps", 1)

    @jax.jit
    def states(key, data):
        def step(state, _):
            draws = learner.draw(key, state, data)
            first = draws.gradient if steps == 1 else jax.tree.map(lambda leaf: leaf[:, 0], draws.gradient)
            g, *_ = estimator.estimate(task, state.params, None, data, first, state.round_index)
            new, _ = learner.update(state, data, draws)
            return new, (new.params, new.memory | {"g": g})

        first = learner.init(key, data)
        return (first.params, first.memory | {"g": first.params}), jax.lax.scan(step, first, length=MANY)[1]

    kept = jax.tree.map(lambda one, more: np.concatenate([one[None], more]), *states(KEY, data))
    (x, memory) = (jax.tree.map(lambda leaf: np.float64(leaf), one) for one in kept)
    x, memory = _stacked(x), {name: _stacked(one) for name, one in memory.items()}
    error = np.abs(c.invariant(x, memory)).max() / np.abs(x).max()
    print(f"{case}: error of the invariant {error:.1e}")
    assert error < 1e-5
    assert np.isfinite(error)
    assert x[-1].std(axis=0).max() > 1e-3, "the nodes must differ for this test to mean something"


def _stacked(tree):
    """Leaves (rounds, n, *leaf) as (rounds, n, d)."""
    return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(tree)], axis=-1)


@pytest.mark.parametrize("name", [name for name, c in CASES.items() if c.off])
def test_a_part_that_is_switched_off_leaves_the_plain_method(name):
    """A round from the start, where memories are 0, and one from where three have come to, with memories of 0."""
    c = CASES[name]
    assert c.off is not None
    arguments, plain, options = c.off
    p = problem(c.name)
    common = {"graph": graphs.ring(5), "step_size": STEP_SIZE, "gradient": jaxfl.mini_batch(BATCH)}
    ours = p.row.constructor(linear_task(), **common, **(c.arguments | arguments))
    theirs = plain(linear_task(), **(common | options))
    start, *_, last = one_by_one(ours, KEY, p.data, 3).states
    for state in (start, last._replace(memory=start.memory, round_index=start.round_index)):
        other = theirs.init(KEY, p.data)._replace(params=state.params)
        actual, expected = (one.round(KEY, of, p.data)[0].params for one, of in ((ours, state), (theirs, other)))
        assert_same(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", dict.fromkeys(c.name for c in CASES.values()))
def test_a_round_releases_one_noisy_gradient(name):
    """Epsilon is that of D-PSGD, whatever the method remembers; of K local steps, that of K times the rounds."""
    gradient = jaxfl.mini_batch(sampler=jaxfl.gradients.poisson(2), clip_norm=1.0)
    arguments = {"graph": RING, "step_size": 0.1, "gradient": gradient, "noise": jaxfl.gaussian(2.0)}
    of_case = next(c.arguments for c in CASES.values() if c.name == name)
    ours = problem(name).row.constructor(linear_task(), **(of_case | arguments))
    learners = (ours, 50), (jaxfl.d_psgd(linear_task(), **arguments), 50 * of_case.get("num_local_steps", 1))
    ours, theirs = (privacy.statements(one, [90] * 16, num_rounds=k, dp_delta=1e-5) for one, k in learners)
    proven = [{s.neighboring_relation: s.dp_epsilon for s in some if s.bound == "proven"} for some in (ours, theirs)]
    assert proven[0] == proven[1] != {}


WHOLE = {
    "choco_sgd in the order of ICLR": (jaxfl.choco_sgd, ALL_OF_IT | {"order": "iclr"}, jaxfl.d_psgd),
    "prox_skip": (jaxfl.prox_skip, {"exchange_probability": 1.0}, jaxfl.exact_diffusion),
}


@pytest.mark.parametrize("name", WHOLE)
def test_messages_that_are_whole_leave_the_plain_method(name):
    method, arguments, plain = WHOLE[name]
    common = {"graph": graphs.ring(5), "step_size": STEP_SIZE, "gradient": jaxfl.mini_batch(BATCH)}
    ours, theirs = method(linear_task(), **common, **arguments), plain(linear_task(), **common)
    actual, expected = (run(one, KEY, uneven_data(), 9)[0].params for one in (ours, theirs))
    assert_same(actual, expected, rtol=1e-5, atol=1e-6)


EXACT = [name for name, c in CASES.items() if "momentum" not in c.arguments and c.name != "choco_sgd"]


@pytest.mark.parametrize("name", EXACT)
def test_full_batches_reach_the_minimum_and_stay(name):
    """In float32, where textbook forms drift away: the largest distance after 600 rounds and after 3,000."""
    c, data = CASES[name], uneven_data(sizes=(8,) * 16, features=3, classes=5)
    task = jaxfl.from_functions(lambda key: jnp.ones(3), lambda w, x, y: (x @ w - y.astype(x.dtype)) ** 2 / 2)
    arguments = {"graph": DENSER, "step_size": 0.1, "gradient": jaxfl.mini_batch(8)} | c.arguments
    learner = problem(c.name).row.constructor(task, **arguments)
    (middle, _), minimum = run(learner, KEY, data, 600), np.linalg.lstsq(data.inputs, np.float64(data.labels))[0]
    last, _ = run(learner, KEY, data, 2400, middle)
    errors = [np.abs(by_node(state.params) - minimum).max() for state in (middle, last)]
    print(f"{name}: distance from the minimum {errors[0]:.1e}, {errors[1]:.1e}")
    assert errors[0] < 2e-5
    assert errors[1] < 2e-6


def test_d2_on_a_complete_graph_is_gradient_descent_on_the_mean():
    data, task = uneven_data(sizes=(8,) * 4), linear_task()
    arguments = {"graph": graphs.complete(4), "step_size": 0.05, "gradient": jaxfl.mini_batch(8)}
    ours = jaxfl.exact_diffusion(task, variant="d2", **arguments)
    alone = jaxfl.d_psgd(task, **(arguments | {"graph": graphs.complete(1), "gradient": jaxfl.mini_batch(32)}))
    pooled = data._replace(indices=data.indices.reshape(1, -1), sizes=np.array([32], np.int32))
    (actual, _), (expected, _) = run(ours, KEY, data, 20), run(alone, KEY, pooled, 20)
    np.testing.assert_allclose(by_node(actual.params), np.tile(by_node(expected.params), (4, 1)), rtol=1e-5, atol=1e-6)


def test_k_gt_on_a_complete_graph_is_scaffold_with_all_clients():
    """Its c_i is SCAFFOLD's c - c_i, and its exchange the server's step."""
    data, task = uneven_data(sizes=(8,) * 4), linear_task()
    ours = jaxfl.k_gt(task, graph=graphs.complete(4), step_size=0.05, gradient=jaxfl.mini_batch(8), **LOCAL)
    clients = jaxfl.local_steps(3, batch_size=8, optimizer=optax.sgd(0.05), weighting="uniform")
    theirs = jaxfl.scaffold(task, clients=clients, num_active=4, server_step_size=LOCAL["communication_step"])
    (actual, _), (expected, _) = (run(one, KEY, data, 20) for one in (ours, theirs))
    model = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(expected.params)])
    np.testing.assert_allclose(by_node(actual.params), np.tile(model, (4, 1)), rtol=1e-5, atol=1e-6)


def test_gt_saga_reaches_the_minimum_with_one_sample_a_round():
    data = uneven_data(sizes=(8,) * 8, features=3, classes=5)
    task = jaxfl.from_functions(lambda key: jnp.ones(3), lambda w, x, y: (x @ w - y.astype(x.dtype)) ** 2 / 2)
    minimum, errors = np.linalg.lstsq(data.inputs, np.float64(data.labels))[0], {}
    for name, gradient in (("table", None), ("none", jaxfl.mini_batch())):
        learner = jaxfl.gt_saga(task, graph=graphs.complete(8), step_size=0.05, gradient=gradient)
        errors[name] = np.abs(by_node(run(learner, KEY, data, 2000)[0].params) - minimum).max()
    print("one sample a round", errors)
    assert errors["table"] < 1e-5
    assert errors["none"] > 1e-2
