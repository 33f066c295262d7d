"""No two draws of a round share a key, in the rows of the registry and the components that have noise of their own."""

import collections
import sys

import jax
import jax.core
import numpy as np
import optax
import pytest
from examples import LOSSY
from problems import problem
from registry import REGISTRY

import jaxfl
from jaxfl.algorithms import clipped_gossip, random_activation, random_updates
from jaxfl.algorithms.clients.feedback import ef21
from jaxfl.algorithms.clients.local_steps import local_steps
from jaxfl.channel import rand_k
from jaxfl.core import keys
from jaxfl.gradients import poisson, saga

KEY = jax.random.key(0)
PRIVATE = local_steps(
    2,
    batch_size=2,
    optimizer=optax.sgd(0.1),
    sampler=poisson,
    clip_norm=1.0,
    noise=jaxfl.gaussian(0.1),
    weighting="uniform",
)
UNIFORM = local_steps(2, batch_size=2, optimizer=optax.sgd(0.1), weighting="uniform")
UPDATES = jaxfl.private_updates(clip_norm=1.0, noise=jaxfl.gaussian(0.1), num_rounds=10)
PRIVATELY = jaxfl.uplink(updates=UPDATES)
CONSTANTS = jaxfl.private_constants(3, clip_norm=1.0, loss_bound=1.0, noise_multiplier=1.0)
COMPONENTS = [
    ("d_psgd", {"links": jaxfl.links(0.6, recovery=0.3)}),
    ("d_psgd", {"aggregate": clipped_gossip(1.0), "attack": random_updates([1], std=1.0)}),
    ("d_sgdm", {"links": jaxfl.links(0.6), "activation": random_activation(0.5)}),
    ("push_sum", {"gradient": lambda **options: saga(sampler=poisson(2), **options)}),
    ("fed_avg", {"clients": PRIVATE, "uplink": PRIVATELY}),
    ("embracing", {"clients": UNIFORM, "uplink": PRIVATELY}),
    ("fed_avg", {"clients": UNIFORM, "uplink": jaxfl.uplink(feedback=ef21(rand_k(0.5)))}),
    ("ali_dpfl", {"constants": CONSTANTS}),
]
CASES = [(name, {}) for name in REGISTRY] + COMPONENTS
CASES += [(name, over(LOSSY)) for name in REGISTRY if (over := problem(name).example.over) is not None]


def asked_for(algorithm, state, data, monkeypatch):
    """Purpose -> stream and round of the keys that one draw asks for; None for a round that only the device knows."""
    query, held, real, real_stream = collections.defaultdict(list), {}, keys.purpose_key, keys.stream_key

    def spy(key, purpose, round_index=0, **options):
        stream, _ = held.get(id(key), (0, key))
        query[purpose].append((stream, None if isinstance(round_index, jax.core.Tracer) else int(round_index)))
        return real(key, purpose, round_index, **options)

    def spy_stream(key, stream):
        made = real_stream(key, stream)
        held[id(made)] = stream, made  # held, so that no other key gets its place
        return made

    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            for attribute, of_real, of_spy in (("purpose_key", real, spy), ("stream_key", real_stream, spy_stream)):
                if name.startswith("jaxfl") and getattr(module, attribute, None) is of_real:
                    patch.setattr(module, attribute, of_spy)
        jax.eval_shape(lambda: algorithm.draw(KEY, state, data))
    return query


@pytest.mark.parametrize(
    ("name", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_no_two_draws_of_a_round_share_a_key(name, changes, monkeypatch):
    p = problem(name)
    algorithm = p.algorithm(clip_norm=1.0, **changes)
    first = jax.eval_shape(lambda: algorithm.init(KEY, p.data))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), first)
    query = asked_for(algorithm, state._replace(round_index=np.int32(5)), p.data, monkeypatch)
    assert query
    for purpose, rounds in query.items():
        assert len(set(rounds)) == len(rounds), f"two draws of a round share the key of {purpose.name}"
        assert len(rounds) == 1 or all(round_index is not None for _, round_index in rounds)
