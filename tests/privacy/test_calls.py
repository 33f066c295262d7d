"""A wrong call of the functions that account for a learner is refused in one sentence, whatever the learner."""

import jax.numpy as jnp
import optax
import pytest

import jaxfl
from jaxfl import privacy
from jaxfl.core import ArgumentError

TASK = jaxfl.from_functions(lambda key: jnp.zeros(2), lambda w, x, y: (x @ w - y) ** 2)
CLIENTS = jaxfl.local_steps(2, batch_size=4, optimizer=optax.sgd(0.1), clip_norm=1.0, noise=jaxfl.gaussian(0.1))
LEARNERS = {
    "push_sum": jaxfl.push_sum(
        TASK,
        graph=jaxfl.graphs.directed_ring(4),
        step_size=0.1,
        gradient=jaxfl.mini_batch(sampler=jaxfl.gradients.poisson(4), clip_norm=1.0),
        noise=jaxfl.gaussian(0.05),
    ),
    "fed_avg": jaxfl.fed_avg(TASK, clients=CLIENTS, num_active=4),
}
SIZES = [40] * 4


@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
@pytest.mark.parametrize(
    ("verb", "further", "named", "wrong", "says"),
    [
        ("epsilon", (SIZES, 20), {}, "dp_delta", "must be given"),
        ("statements", (SIZES, 20), {}, "dp_delta", "must be given"),
        ("account", (SIZES,), {}, "dp_delta", "must be given"),
        ("account", (SIZES,), {"delta": 1e-5}, "delta", "Pass dp_delta="),
        ("epsilon", (), {"dp_delta": 1e-5}, "sizes", "must be given"),
        ("most_rounds", (SIZES,), {"dp_delta": 1e-5}, "target_epsilon", "must be given"),
        ("calibrate", (), {}, "sizes", "must be given"),
        ("calibrate", (SIZES, 20, 3.0), {"dp_delta": 1e-5}, "learner_of", "function of the noise"),
    ],
)
def test_a_call_that_lacks_something_names_it(learner, verb, further, named, wrong, says):
    with pytest.raises(ArgumentError, match=rf"^{wrong}: .*{says}"):
        getattr(privacy, verb)(learner, *further, **named)


def test_right_calls_are_taken_by_name_and_by_position():
    learner = LEARNERS["push_sum"]
    by_position = privacy.epsilon(learner, SIZES, 20, dp_delta=1e-5)
    assert by_position == privacy.epsilon(learner=learner, sizes=SIZES, num_rounds=20, dp_delta=1e-5) > 0


@pytest.mark.parametrize("name", ["step_size", "lr"])
@pytest.mark.parametrize("constructor", [jaxfl.fed_adam, jaxfl.fed_avgm, jaxfl.scaffold])
def test_a_step_size_of_a_server_method_names_both_places(constructor, name):
    with pytest.raises(ArgumentError, match=rf"^{name}: .*clients=jaxfl.local_steps\(.* or server_step_size=0\.1\.$"):
        constructor(TASK, clients=CLIENTS, num_active=4, **{name: 0.1})
