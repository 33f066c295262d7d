"""A learner says what it releases, and a round is counted by what it does: sampler, batch, clip norm, noise.

Sample i has the gradient 1000 e_i wherever it is taken. So coordinate i of a released gradient tells how often sample i
was in the batch, and how far one sample moves a release.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import problem
from registry import REGISTRY

import jaxfl
from jaxfl import graphs, models, privacy
from jaxfl.algorithms.a_dp2_sgd import a_dp2_sgd
from jaxfl.core import ArgumentError
from jaxfl.gradients import fixed, poisson, uniform
from jaxfl.privacy import clients, gossip, tracking

SAMPLES, BATCH, CLIP, NOISE, RATE, ROUNDS = 24, 6, 1.5, 0.004, 0.5, 300
SAMPLERS = {"poisson": poisson, "fixed": fixed, "uniform": uniform}
TASK = jaxfl.from_functions(lambda key: jnp.zeros(SAMPLES), lambda w, x, y: x @ w)
INPUTS = 1e3 * np.eye(SAMPLES, dtype="float32")
DATA = jaxfl.federate(INPUTS, np.zeros(SAMPLES, "float32"), [np.arange(SAMPLES)])
# Labels of two classes, 0 and 0: at zero parameters all logits are equal, and a gradient is along (-1, 1) / sqrt(2).
BY_CLIENT = jaxfl.federate(INPUTS, np.zeros(SAMPLES, "int32"), [[i] for i in range(SAMPLES)])
LINEAR = models.classification(models.mlp((SAMPLES, 2)))
ONE_CLASS = np.zeros(SAMPLES, int)


def gossip_learner(build, estimator, sampler, noise):
    gradient = getattr(jaxfl, estimator)(sampler=SAMPLERS[sampler](BATCH), clip_norm=CLIP)
    return build(TASK, graph=graphs.complete(1), step_size=RATE, gradient=gradient, noise=noise)


def clients_learner(build, sampler=poisson, weighting="data", **settings):
    steps = jaxfl.local_steps(
        3 if build is jaxfl.ali_dpfl else 1,
        batch_size=BATCH,
        optimizer=optax.sgd(RATE),
        sampler=sampler,
        clip_norm=CLIP,
        noise=jaxfl.gaussian(NOISE),
        weighting=weighting,
    )
    return build(TASK, clients=steps, **settings)


ALONE = jaxfl.local_steps(1, batch_size=BATCH, optimizer=optax.sgd(RATE), weighting="uniform")
# Server steps of these are linear where tau is large; FedDyn's first round moves x twice as far as its client.
TAU = 1e3
SERVER_METHODS = {
    "fed_avgm": jaxfl.fed_avgm,
    "fed_adagrad": functools.partial(jaxfl.fed_adagrad, tau=TAU, server_step_size=2 * TAU),
    "fed_adam": functools.partial(jaxfl.fed_adam, tau=TAU, server_step_size=(1 + 0.99**0.5) * TAU, beta_1=0.0),
    "fed_yogi": functools.partial(jaxfl.fed_yogi, tau=TAU, server_step_size=2 * TAU, beta_1=0.0),
    "fed_prox": functools.partial(jaxfl.fed_prox, proximal=0.1),
    "scaffold": jaxfl.scaffold,
    "fed_nova": functools.partial(jaxfl.fed_nova, num_steps=np.ones(1, int)),
    "fed_dyn": functools.partial(jaxfl.fed_dyn, proximal=0.1),
    "ditto": functools.partial(jaxfl.ditto, own=ALONE, proximal=0.1),
    "apfl": jaxfl.apfl,
}
FARTHER = {"fed_dyn": 2.0}


def ali_dpfl():
    constants = jaxfl.private_constants(12, clip_norm=1.0, loss_bound=0.5, noise_multiplier=20.0)
    budget = {"max_rounds": 5, "max_iterations": 20, "step_size": RATE}
    return clients_learner(jaxfl.ali_dpfl, constants=constants, **budget)


def whole_clients(build, task=TASK, **settings):
    steps = jaxfl.local_steps(1, batch_size=1, optimizer=optax.sgd(RATE), weighting="uniform")
    updates = jaxfl.private_updates(clip_norm=RATE * CLIP, noise=jaxfl.gaussian(RATE * NOISE * BATCH))
    if build is jaxfl.width_reduction:
        return build((task,), clients=steps, num_active=BATCH, uplink=jaxfl.uplink(updates=updates), **settings)
    return build(task, clients=steps, num_active=BATCH, uplink=jaxfl.uplink(updates=updates), **settings)


LEARNERS = {
    **{
        f"{build.__name__}, {estimator}, {sampler}": (
            functools.partial(gossip_learner, build, estimator, sampler, jaxfl.gaussian(NOISE)),
            DATA,
        )
        for build, estimator, sampler in [
            *((jaxfl.push_sum, "mini_batch", sampler) for sampler in SAMPLERS),
            (jaxfl.push_sum, "saga", "poisson"),
            (jaxfl.d_psgd, "saga", "uniform"),
            (jaxfl.dp2_sgd, "mini_batch", "fixed"),
            (jaxfl.gt_saga, "saga", "poisson"),
            (a_dp2_sgd, "mini_batch", "uniform"),
        ]
    },
    **{  # whose first round at one node is a step along the released gradient
        name: (functools.partial(gossip_learner, build, "mini_batch", "poisson", jaxfl.gaussian(NOISE)), DATA)
        for name, build in {
            **{name: getattr(jaxfl, name) for name in ("d_sgdm", "qg_dsgdm", "exact_diffusion", "nids", "extra")},
            **{name: getattr(jaxfl, name) for name in ("diging", "atc_tracking")},
            "prox_skip": functools.partial(jaxfl.prox_skip, exchange_probability=1.0),
            "k_gt": functools.partial(jaxfl.k_gt, num_local_steps=1),
            "choco_sgd": functools.partial(jaxfl.choco_sgd, compressor=jaxfl.channel.top_k(0.5), consensus_step=0.3),
        }.items()
    },
    **{
        name: (functools.partial(clients_learner, build, num_active=1, weighting="uniform"), DATA)
        for name, build in SERVER_METHODS.items()
    },
    "push_sum, grid": (
        functools.partial(
            gossip_learner, jaxfl.push_sum, "mini_batch", "poisson", jaxfl.privacy.grid_gaussian(NOISE, 10)
        ),
        DATA,
    ),
    "fed_avg": (functools.partial(clients_learner, jaxfl.fed_avg, num_active=1), DATA),
    "partial_averaging": (functools.partial(clients_learner, jaxfl.partial_averaging, synchronized=()), DATA),
    "ali_dpfl": (ali_dpfl, DATA),
    "fed_avg, whole clients": (functools.partial(whole_clients, jaxfl.fed_avg), BY_CLIENT),
    "per_fed_avg, whole clients": (
        functools.partial(whole_clients, functools.partial(jaxfl.per_fed_avg, inner_step_size=0.1)),
        BY_CLIENT,
    ),
    "embracing, whole clients": (
        functools.partial(
            whole_clients, jaxfl.embracing, LINEAR, trained_blocks=[LINEAR.blocks], client_class=ONE_CLASS
        ),
        BY_CLIENT,
    ),
    "width_reduction, whole clients": (
        functools.partial(whole_clients, jaxfl.width_reduction, LINEAR, client_class=ONE_CLASS),
        BY_CLIENT,
    ),
}


def described(release) -> tuple[str, float, float, float]:
    """Sampler, batch, clip norm and noise of a mean gradient, as a release says them."""
    assert release.clip_norm is not None
    if isinstance(release, privacy.Release):
        return release.sampler, release.batch_size, release.clip_norm, release.noise_std
    if isinstance(release, privacy.ClientRelease):
        std = release.noise_multiplier * release.clip_norm / release.batch_size
        return release.sampler, release.batch_size, release.clip_norm, std
    batch, norm = release.participation_rate * SAMPLES, release.clip_norm / RATE
    return release.sampler, batch, norm, release.noise_multiplier * norm / batch


@pytest.mark.parametrize("name", LEARNERS)
def test_what_a_round_does_is_what_the_learner_says(name):
    make, data = LEARNERS[name]
    learner = make()
    sampler, batch, norm, noise_std = described(privacy.releases_of(learner, data).each[0])

    def released(key):
        state = learner.init(key, data)
        if getattr(state, "gradient", None) is not None:  # an empty table, or it would hide the batch
            table = state.gradient
            rows, mean = jnp.zeros_like(table.rows), jax.tree.map(jnp.zeros_like, table.table_mean)
            empty = table._replace(table=jnp.zeros_like(table.table), rows=rows, table_mean=mean)
            state = state._replace(gradient=empty)
        if not hasattr(state.params, "shape"):
            state = state._replace(params=jax.tree.map(jnp.zeros_like, state.params))
        after, _ = learner.round(key, state, data)
        step = RATE * FARTHER.get(name, 1.0)
        moved = jax.tree.map(lambda old, new: (old - new)[0] / step, *map(learner.node_params, (state, after)))
        matrix = next((leaf for leaf in jax.tree.leaves(moved) if leaf.ndim == 2), None)  # beside a bias
        return moved if matrix is None else matrix @ jnp.array([-1.0, 1.0]) / math.sqrt(2)

    gradients = np.asarray(jax.jit(jax.vmap(released))(jax.random.split(jax.random.key(0), ROUNDS)), np.float64)
    counts = np.rint(gradients * batch / norm)
    errors = gradients - counts * norm / batch
    assert np.sqrt((errors**2).mean()) == pytest.approx(noise_std, rel=5 / math.sqrt(2 * errors.size))
    in_batch = counts.sum(axis=1)
    spread = math.sqrt(batch * (1 - batch / SAMPLES) / ROUNDS)
    assert in_batch.mean() == pytest.approx(batch, abs=5 * spread)
    assert counts.min() >= 0
    seen = "poisson" if in_batch.std() > 0 else "uniform" if counts.max() > 1 else "fixed"
    assert seen == sampler


def tracking_learner(build, distribution, schedule, **settings):
    if build is jaxfl.gradient_tracking:
        one = np.ones((1, 1))
        settings |= {"state_weights": one, "tracker_weights": one}
    else:
        settings["graph"] = graphs.complete(1)
    return build(TASK, schedule=schedule, clip_norm=CLIP, distribution=distribution, **settings)


TRACKING = {
    jaxfl.gradient_tracking: tracking.gradient_tracking_account,
    jaxfl.perturbed_gossip: tracking.perturbed_state_account,
    jaxfl.output_perturbation: tracking.output_perturbation_account,
}


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
@pytest.mark.parametrize(("build", "account"), TRACKING.items())
def test_noise_batch_and_clip_norm_of_tracking_are_those_that_are_stated(build, account, distribution):
    scales = np.array([[0.3, 0.2, 0.1]])
    schedule = tracking.TrackingSchedule(0.1, 0.1, RATE, BATCH, scales, 2 * scales)
    learner = tracking_learner(build, distribution, schedule)
    (release,) = privacy.releases_of(learner, DATA).each
    assert (release.distribution, release.clip_norm) == (distribution, CLIP)
    own = {"state_in_weights": np.ones(1), "tracker_out_weights": np.ones(1)}
    own = own if build is jaxfl.gradient_tracking else {"num_nodes": 1}
    options = {"dp_delta": 1e-5, "num_local_samples": [SAMPLES]}
    expected = account(schedule, release, **own, **options)
    assert privacy.statements(learner, DATA, 2, dp_delta=1e-5) == expected.statements(2)
    keys = jax.random.split(jax.random.key(0), ROUNDS)
    draws = jax.jit(jax.vmap(lambda key: learner.draw(key, learner.init(key, DATA), DATA)))(keys)
    assert {len(set(batch)) for batch in draws.gradient.indices[:, 0].tolist()} == {BATCH}
    assert draws.gradient.mask.all()
    spread = math.sqrt(2 if distribution == "laplace" else 1)  # of noise with scale 1
    first = 0 if build is jaxfl.output_perturbation else 1  # of the iterations whose noise a round draws
    assert np.std(draws.state_noise) == pytest.approx(spread * scales[0, first], rel=0.05)
    silent = tracking_learner(build, distribution, schedule._replace(state_noise_scale=0 * scales, num_samples=1))
    start = silent.init(keys[0], DATA)
    drawn = silent.draw(keys[0], start, DATA)
    drawn = drawn._replace(**{name: 0 * getattr(drawn, name) for name in drawn._fields if name.endswith("_noise")})
    if build is jaxfl.gradient_tracking:
        moved = start.gradient[0]
    else:
        moved = (silent.update(start, DATA, drawn)[0].params - start.params)[0] / RATE
    assert np.abs(moved).max() == pytest.approx(CLIP, rel=1e-5)


def test_quantization_is_stated_where_there_is_no_noise():
    quiet = tracking.TrackingSchedule(0.1, 0.1, 1e-3, BATCH, np.zeros((1, 3)), np.zeros((1, 3)))
    quantizer = jaxfl.channel.ternary_quantizer(2.0)
    learner = tracking_learner(jaxfl.perturbed_gossip, "laplace", quiet, quantizer=quantizer, gradient_at="broadcast")
    actual = privacy.statements(learner, DATA, 2)
    (release,) = privacy.releases_of(learner, DATA).each
    own = {"num_nodes": 1, "num_local_samples": [SAMPLES], "quantization_step": 2.0}
    assert actual == tracking.quantization_account(quiet, release, **own).statements(2)
    assert 0 < actual[-1].dp_delta < 1


def test_a_learner_is_asked_and_not_described():
    """The batch that a learner draws decides: uniform batches cost four times what Poisson ones cost."""
    epsilons = {}
    for sampler in ("poisson", "uniform"):
        learner = gossip_learner(jaxfl.push_sum, "mini_batch", sampler, jaxfl.gaussian(2.0))
        epsilons[sampler] = privacy.epsilon(learner, [1200], 300, dp_delta=1e-5)
        release = privacy.Release("mini_batch", sampler, BATCH, 1200, clip_norm=CLIP, noise_std=2.0)
        assert epsilons[sampler] == gossip.account(privacy.PRIVSGP, release, dp_delta=1e-5).epsilon(300)
    assert epsilons["poisson"] < epsilons["uniform"]


def test_calibrated_noise_meets_the_budget():
    def learner_of(noise_std):
        return gossip_learner(jaxfl.push_sum, "mini_batch", "poisson", jaxfl.gaussian(noise_std))

    budget = {"dp_delta": 1e-5, "neighboring_relation": "replace_one"}
    noise = privacy.calibrate(learner_of, [1200], 300, 3.0, **budget)
    account = privacy.account(learner_of(0.5), [1200], dp_delta=1e-5)
    factor = account.calibrate(300, 3.0, "proven", "replace_one")
    assert 0.5 * factor == pytest.approx(noise, rel=1e-3)
    assert privacy.epsilon(learner_of(noise), [1200], 300, **budget) <= 3.0
    rounds = privacy.most_rounds(learner_of(noise), [1200], 3.0, 400, **budget)
    assert 300 <= rounds < 303
    assert privacy.calibrate(learner_of, [1200], 0, 3.0, **budget) == 0.0


def test_nodes_of_several_runs_are_accounted_for_together():
    learner = gossip_learner(jaxfl.push_sum, "mini_batch", "poisson", jaxfl.gaussian(2.0))
    together = privacy.statements(learner, [[1200], [600]], 300, dp_delta=1e-5)[1]
    each = [privacy.epsilon(learner, sizes, 300, dp_delta=1e-5) for sizes in ([1200], [600])]
    assert (together.node_epsilons, together.nodes) == (tuple(each), 1)
    silent = tracking.TrackingSchedule(0.1, 0.1, RATE, BATCH, np.ones(3), np.ones(3))
    with pytest.raises(ArgumentError, match=r"^sizes: must be of one run"):
        privacy.account(tracking_learner(jaxfl.perturbed_gossip, "laplace", silent), [[24], [24]])


def test_estimates_of_private_constants_are_those_that_are_said():
    """Their batches, and their noise: xi grows by z sqrt(3) C / m a unit of it."""
    learner = ali_dpfl()
    (release,) = privacy.releases_of(learner, DATA).each
    assert release.estimates == "private"
    start = learner.init(jax.random.key(0), DATA)
    draws = jax.jit(jax.vmap(lambda key: learner.draw(key, start, DATA)))(jax.random.split(jax.random.key(0), ROUNDS))
    in_batch = (np.asarray(draws.constants.batch_indices) < SAMPLES).sum(axis=(1, 2))
    assert in_batch.mean() == pytest.approx(release.estimate_batch_size, abs=5 * math.sqrt(6 / ROUNDS))
    assert in_batch.std() == pytest.approx(math.sqrt(6), rel=0.2), "Poisson: each sample independently"
    assert np.std(draws.constants.noise) == pytest.approx(1.0, rel=0.1)
    one = jax.tree.map(lambda leaf: leaf[0], draws)

    def xi(noise):
        constants = one.constants._replace(noise=jnp.full_like(one.constants.noise, noise))
        return float(learner.update(start, DATA, one._replace(constants=constants))[0].constants.xi[0])

    std = (xi(2e6) - xi(1e6)) / 1e6
    assert std * release.estimate_batch_size / math.sqrt(3) == pytest.approx(
        release.estimate_noise_multiplier, rel=1e-3
    )


def test_every_learner_that_says_its_releases_is_counted():
    counted = {name.split(",")[0] for name in LEARNERS} | {build.__name__ for build in TRACKING}
    assert counted == {name for name in REGISTRY if problem(name).algorithm(noise_scale=0.02).releases is not None}


def test_iterations_that_ran_are_counted_round_by_round():
    """Steps of a round may follow from its index; without private updates every client counts as active."""
    steps = jaxfl.local_steps(
        4,
        batch_size=BATCH,
        optimizer=optax.sgd(RATE),
        sampler=poisson,
        clip_norm=CLIP,
        noise=jaxfl.gaussian(1.0),
        num_steps=lambda k: 4 - k,
    )
    learner = jaxfl.fed_avg(TASK, clients=steps, num_active=1)
    release = privacy.ClientRelease("poisson", SAMPLES, BATCH, CLIP, BATCH / CLIP)
    expected = clients.account([release] * 2, dp_delta=1e-5).statements(4 + 3 + 2)
    assert privacy.statements(learner, [SAMPLES] * 2, 3, dp_delta=1e-5) == expected


@pytest.mark.parametrize(
    ("learner", "sizes", "argument"),
    [
        (jaxfl.ab(TASK, graph=graphs.ring(3), step_size=0.1), [9] * 3, "learner"),
        (object(), [9], "learner"),
        (gossip_learner(jaxfl.push_sum, "mini_batch", "fixed", jaxfl.laplace(1.0)), [9], "noise"),
        (gossip_learner(jaxfl.push_sum, "mini_batch", "fixed", jaxfl.gaussian(1.0)), [9, 9], "sizes"),
        (gossip_learner(jaxfl.push_sum, "mini_batch", "fixed", jaxfl.gaussian(1.0)), [9.0], "sizes"),
        (gossip_learner(jaxfl.push_sum, "mini_batch", "fixed", jaxfl.gaussian(1.0)), 9, "sizes"),
        (clients_learner(jaxfl.fed_avg, sampler=fixed, num_active=1), [9], "sampler"),
    ],
)
def test_what_has_no_statement_is_refused(learner, sizes, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}:"):
        privacy.statements(learner, sizes, 3, dp_delta=1e-5)


def test_traced_numbers_are_refused():
    def spent(noise_std):
        learner = gossip_learner(jaxfl.push_sum, "mini_batch", "poisson", jaxfl.gaussian(noise_std))
        return privacy.epsilon(learner, DATA, 3, dp_delta=1e-5)

    with pytest.raises(ArgumentError, match=r"^noise: must be a number where releases are asked for"):
        jax.jit(spent)(1.0)


def test_a_learner_with_traced_numbers_trains_though_it_says_no_releases():
    def moved(noise_multiplier):
        constants = jaxfl.private_constants(12, clip_norm=1.0, loss_bound=0.5, noise_multiplier=noise_multiplier)
        budget = {"max_rounds": 5, "max_iterations": 20, "step_size": RATE}
        learner = clients_learner(jaxfl.ali_dpfl, constants=constants, **budget)
        state, _ = learner.round(jax.random.key(0), learner.init(jax.random.key(0), DATA), DATA)
        return state.params

    assert np.isfinite(jax.jit(moved)(20.0)).all()


def test_an_algorithm_of_ones_own_says_its_releases():
    plain = gossip_learner(jaxfl.d_psgd, "mini_batch", "poisson", jaxfl.gaussian(2.0))
    parts = plain.init, plain.draw, plain.update, plain.node_params
    with pytest.raises(ArgumentError, match=r"^learner: "):
        privacy.statements(jaxfl.core.algorithm(*parts), DATA, 3, dp_delta=1e-5)
    own = jaxfl.core.algorithm(*parts, releases=plain.releases)
    assert privacy.statements(own, DATA, 3, dp_delta=1e-5) == privacy.statements(plain, DATA, 3, dp_delta=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS.values())
@pytest.mark.parametrize("clip_norm", [None, CLIP])
def test_the_reason_of_a_server_method_without_noise_is_the_noise(sampler, clip_norm):
    """Whatever draws its batches: no other draw would give it an epsilon."""
    steps = jaxfl.local_steps(1, batch_size=1, optimizer=optax.sgd(RATE), sampler=sampler, clip_norm=clip_norm)
    learner = jaxfl.fed_avg(LINEAR, clients=steps, num_active=SAMPLES)
    stated = privacy.account(learner, BY_CLIENT, dp_delta=1e-5).statements(3)
    assert {one.dp_epsilon for one in stated} == {None}
    wanted = "Gradients are not clipped" if clip_norm is None else "No noise is added"
    assert all(str(one.reason).startswith(wanted) for one in stated)
