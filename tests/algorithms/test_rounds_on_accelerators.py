"""No host waits inside a round: the accelerator's form of a round holds no branch and no loop of unknown length."""

import jax
import pytest
from problems import small_task, uneven_data

import jaxfl
from jaxfl import gradients, graphs
from jaxfl.core.platform import tracing_for
from jaxfl.privacy.tracking import exponential_schedule

ESTIMATES = {
    "mini-batch": gradients.mini_batch(sampler=gradients.fixed(3), clip_norm=1.0),
    "poisson": gradients.mini_batch(sampler=gradients.poisson(3), clip_norm=1.0),
    "dense table": gradients.saga(sampler=gradients.uniform(3), clip_norm=1.0),
    "factored table": gradients.saga(sampler=gradients.fixed(3), table="factored", clip_norm=1.0),
}


def schedule():
    return exponential_schedule(10, state_noise_base=0.5, tracker_noise_base=0.5)


def over_changing_graph(constructor, estimate):
    return lambda task: constructor(
        task,
        graph=graphs.exponential(5),
        gradient=ESTIMATES[estimate],
        noise=jaxfl.gaussian(0.1),
        step_size=0.1,
    )


CASES = {
    **{f"push_sum, {estimate}": over_changing_graph(jaxfl.push_sum, estimate) for estimate in ESTIMATES},
    "d_psgd, mini-batch": over_changing_graph(jaxfl.d_psgd, "mini-batch"),
}
CASES |= {
    "gradient_tracking": lambda task: jaxfl.gradient_tracking(
        task,
        state_weights=graphs.directed_ring(5).mixing_matrix(0),
        tracker_weights=graphs.directed_ring(5).mixing_matrix(0),
        schedule=schedule(),
        clip_norm=1.0,
    ),
    "perturbed_gossip": lambda task: jaxfl.perturbed_gossip(
        task, graph=graphs.ring(5), schedule=schedule(), clip_norm=1.0
    ),
    "output_perturbation": lambda task: jaxfl.output_perturbation(
        task, graph=graphs.ring(5), schedule=schedule(), clip_norm=1.0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_host_waits_inside_a_round(name):
    with tracing_for("gpu"):
        learner, data = CASES[name](small_task()), uneven_data()
        state = jax.eval_shape(lambda key: learner.init(key, data), jax.random.key(0))
        program = str(jax.make_jaxpr(learner.round)(jax.random.key(0), state, data))
    assert "cond[" not in program
    assert "while[" not in program
