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

import jaxfl
from jaxfl import graphs, privacy
from jaxfl.algorithms.a_dp2_sgd import a_dp2_sgd
from jaxfl.core import ArgumentError
from jaxfl.gradients import fixed, poisson, uniform
from jaxfl.privacy import clients, gossip, tracking

SAMPLES, BATCH, CLIP, NOISE, RATE, ROUNDS = 24, 6, 1.5, 0.004, 0.5, 300
SAMPLERS = {"poisson": poisson, "fixed": fixed, "uniform": uniform}
TASK = jaxfl.from_functions(lambda key: jnp.zeros(SAMPLES), lambda w, x, y: x @ w)
INPUTS = 1e3 * np.eye(SAMPLES, dtype="float32")
DATA = jaxfl.federate(INPUTS, np.zeros(SAMPLES, "float32"), [np.arange(SAMPLES)])
BY_CLIENT = jaxfl.federate(INPUTS, np.zeros(SAMPLES, "float32"), [[i] for i in range(SAMPLES)])


def gossip_learner(build, estimator, sampler, noise):
    gradient = getattr(jaxfl, estimator)(sampler=SAMPLERS[sampler](BATCH), clip_norm=CLIP)
    return build(TASK, graph=graphs.complete(1), step_size=RATE, gradient=gradient, noise=noise)


def clients_learner(build, sampler=poisson, **settings):
    steps = jaxfl.local_steps(
        3 if build is jaxfl.ali_dpfl else 1,
        batch_size=BATCH,
        optimizer=optax.sgd(RATE),
        sampler=sampler,
        clip_norm=CLIP,
        noise=jaxfl.gaussian(NOISE),
    )
    return build(TASK, clients=steps, **settings)


def ali_dpfl():
    constants = jaxfl.private_constants(12, clip_norm=1.0, loss_bound=0.5, noise_multiplier=20.0)
    budget = {"max_rounds": 5, "max_iterations": 20, "step_size": RATE}
    return clients_learner(jaxfl.ali_dpfl, constants=constants, **budget)


def whole_clients():
    steps = jaxfl.local_steps(1, batch_size=1, optimizer=optax.sgd(RATE), weighting="uniform")
    updates = jaxfl.private_updates(clip_norm=RATE * CLIP, noise=jaxfl.gaussian(RATE * NOISE * BATCH))
    return jaxfl.fed_avg(TASK, clients=steps, num_active=BATCH, uplink=jaxfl.uplink(updates=updates))


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
            (a_dp2_sgd, "mini_batch", "uniform"),
        ]
    },
    "grid": (
        functools.partial(
            gossip_learner, jaxfl.push_sum, "mini_batch", "poisson", jaxfl.privacy.grid_gaussian(NOISE, 10)
        ),
        DATA,
    ),
    "fed_avg": (functools.partial(clients_learner, jaxfl.fed_avg, num_active=1), DATA),
    "partial_averaging": (functools.partial(clients_learner, jaxfl.partial_averaging, synchronized=()), DATA),
    "ali_dpfl": (ali_dpfl, DATA),
    "whole clients": (whole_clients, BY_CLIENT),
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
        after, _ = learner.round(key, state, data)
        return (learner.node_params(state) - learner.node_params(after))[0] / RATE

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


@pytest.mark.parametrize("distribution", ["laplace", "gaussian"])
@pytest.mark.parametrize(
    ("build", "stated"),
    [
        (jaxfl.gradient_tracking, tracking.gradient_tracking_statements),
        (jaxfl.perturbed_gossip, tracking.perturbed_state_statements),
        (jaxfl.output_perturbation, tracking.output_perturbation_statements),
    ],
)
def test_noise_and_clip_norm_of_tracking_are_those_that_are_stated(build, stated, distribution):
    scales = np.array([[0.3, 0.2, 0.1]])
    schedule = tracking.TrackingSchedule(0.1, 0.1, RATE, BATCH, scales, 2 * scales)
    learner = tracking_learner(build, distribution, schedule)
    (release,) = privacy.releases_of(learner, DATA).each
    assert (release.distribution, release.clip_norm) == (distribution, CLIP)
    own = {"state_in_weights": np.ones(1), "tracker_out_weights": np.ones(1)}
    own = own if build is jaxfl.gradient_tracking else {"num_nodes": 1}
    options = {"dp_delta": 1e-5, "num_local_samples": [SAMPLES]}
    assert privacy.statements(learner, DATA, 2, dp_delta=1e-5) == stated(schedule, 2, release, **own, **options)
    keys = jax.random.split(jax.random.key(0), ROUNDS)
    draws = jax.jit(jax.vmap(lambda key: learner.draw(key, learner.init(key, DATA), DATA)))(keys)
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
    found = privacy.statements(learner, DATA, 2)
    (release,) = privacy.releases_of(learner, DATA).each
    own = {"num_nodes": 1, "num_local_samples": [SAMPLES], "quantization_step": 2.0}
    assert found == tracking.quantization_statements(quiet, 2, release, **own)
    assert 0 < found[-1].dp_delta < 1


def test_a_learner_is_asked_and_not_described():
    """The batch that a learner draws decides: uniform batches cost four times what Poisson ones cost."""
    epsilons = {}
    for sampler in ("poisson", "uniform"):
        learner = gossip_learner(jaxfl.push_sum, "mini_batch", sampler, jaxfl.gaussian(2.0))
        epsilons[sampler] = privacy.epsilon(learner, [1200], 300, dp_delta=1e-5)
        release = privacy.Release("mini_batch", sampler, BATCH, 1200, clip_norm=CLIP, noise_std=2.0)
        assert epsilons[sampler] == gossip.epsilon(privacy.PRIVSGP, "proven", release, 300, dp_delta=1e-5)
    assert epsilons["poisson"] < epsilons["uniform"]
    learner = gossip_learner(jaxfl.push_sum, "saga", "poisson", jaxfl.gaussian(2.0))
    found = privacy.statements(learner, DATA, 5, dp_delta=1e-5)
    assert [row.bound for row in found] == ["published", "proven", "proven"]


def test_calibrated_noise_meets_the_budget():
    def learner_of(noise_std):
        return gossip_learner(jaxfl.push_sum, "mini_batch", "poisson", jaxfl.gaussian(noise_std))

    budget = {"dp_delta": 1e-5, "neighboring_relation": "replace_one"}
    noise = privacy.calibrate(learner_of, [1200], 300, target_epsilon=3.0, guess=0.1, **budget)
    release = privacy.Release("mini_batch", "poisson", BATCH, 1200, clip_norm=CLIP, noise_std=0.0)
    assert noise == pytest.approx(
        gossip.calibrate_noise_std(privacy.PRIVSGP, "proven", release, 300, target_epsilon=3.0, **budget), rel=1e-3
    )
    assert privacy.epsilon(learner_of(noise), [1200], 300, **budget) <= 3.0


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
    expected = clients.statements([release] * 2, 4 + 3 + 2, dp_delta=1e-5)
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
