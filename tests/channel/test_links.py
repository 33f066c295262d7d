"""Links: which messages arrive, what is sent, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusals, refused

import jaxfl
from jaxfl.channel import uniform_quantizer
from jaxfl.channel.links import QUANTIZER_OVERFLOW, RoundingKeys, RoundingValues
from jaxfl.core import Purpose, node_keys, purpose_key

KEY, NODES, ROUNDS = jax.random.key(4), 6, 2000
RATES = np.random.default_rng(0).uniform(0.1, 0.9, (NODES, NODES))
OTHERS = ~np.eye(NODES, dtype=bool)


def arrivals(links, num_rounds=ROUNDS, num_nodes=NODES):
    """(rounds, n, n), bool."""
    draw = jax.jit(jax.vmap(lambda k: links.draw_between(KEY, k, num_nodes).arrived))
    return np.asarray(draw(jnp.arange(num_rounds, dtype=jnp.int32)))


def at_server(links, round_index, num_nodes):
    """(n,), bool."""
    return np.asarray(links.draw_to_server(KEY, round_index, num_nodes).arrived)


def check_rates(arrived, rates):
    """Each message arrives as often as its rate says, within 4.5 standard errors; no two go together."""
    count = len(arrived)
    assert np.all(np.abs(arrived.mean(axis=0) - rates) <= 4.5 * np.sqrt(rates * (1 - rates) / count))
    assert np.abs(np.corrcoef(arrived.T) - np.eye(arrived.shape[1])).max() < 4.5 / np.sqrt(count), "independent"


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("success", "rates"),
    [(0.7, np.full((NODES, NODES), 0.7)), (RATES[0], np.tile(RATES[0], (NODES, 1))), (RATES, RATES)],
    ids=["one number", "by sender", "by pair"],
)
def test_every_message_arrives_with_its_probability_independently_of_all_others(success, rates):
    arrived = arrivals(jaxfl.links(success))
    assert arrived[:, ~OTHERS].all(), "a node hears itself"
    check_rates(arrived[:, OTHERS].astype(float), rates[OTHERS])
    over_rounds = arrived[:, OTHERS]
    assert np.abs(np.corrcoef(over_rounds[1:, 0], over_rounds[:-1, 0])[0, 1]) < 4.5 / np.sqrt(ROUNDS)


@pytest.mark.statistical
def test_a_server_hears_each_client_with_its_probability():
    draw = jax.jit(jax.vmap(lambda k: jaxfl.links(RATES[0]).draw_to_server(KEY, k, NODES).arrived))
    arrived = np.asarray(draw(jnp.arange(ROUNDS, dtype=jnp.int32)))
    check_rates(arrived.astype(float), RATES[0])


@pytest.mark.statistical
@pytest.mark.parametrize("success", [0.4, (RATES + RATES.T) / 2], ids=["one number", "by pair"])
def test_with_symmetric_the_message_from_j_reaches_i_exactly_where_that_from_i_reaches_j(success):
    arrived = arrivals(jaxfl.links(success, symmetric=True))
    np.testing.assert_array_equal(arrived, arrived.transpose(0, 2, 1))
    above = np.triu_indices(NODES, 1)
    check_rates(arrived[:, *above].astype(float), np.broadcast_to(success, (NODES, NODES))[above])


BURSTS = [(0.9, 0.3), (0.97, 0.1), (0.2, 0.9)]  # success, recovery; the last alternates


@pytest.mark.statistical
@pytest.mark.parametrize(("success", "recovery"), BURSTS)
def test_bursts_have_their_rate_and_length(success, recovery):
    """100,000 draws within 4 standard errors, and the first round by itself: the chain starts where it stays."""
    links, clients = jaxfl.links(success, recovery=recovery), 50
    draw = jax.jit(jax.vmap(lambda k: links.draw_to_server(KEY, k, clients).arrived))
    arrived = np.asarray(draw(jnp.arange(ROUNDS, dtype=jnp.int32)))
    rate = recovery / (1 - success + recovery)
    assert links.rate == pytest.approx(rate)
    memory = success - recovery  # the correlation of a round with the next
    error = 4 * np.sqrt(rate * (1 - rate) / arrived.size * (1 + memory) / (1 - memory))
    assert arrived.mean() == pytest.approx(rate, abs=error)
    ends = (arrived[1:] & ~arrived[:-1]).sum()
    after_loss = (~arrived[:-1]).sum()
    assert ends / after_loss == pytest.approx(recovery, abs=4 * np.sqrt(recovery * (1 - recovery) / after_loss))
    padded = np.pad(~arrived, ((1, 1), (0, 0))).astype(int)
    starts, stops = (np.argwhere((np.diff(padded, axis=0) == sign).T) for sign in (1, -1))
    lengths = (stops - starts)[:, 1]
    spread = np.sqrt(1 - recovery) / recovery / np.sqrt(len(lengths))
    assert lengths.mean() == pytest.approx(1 / recovery, abs=4 * spread + 2 * clients / len(lengths))
    first = at_server(links, 0, 20_000)
    assert first.mean() == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / first.size))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("success", "recovery"), BURSTS)
def test_bursts_are_the_chain_step_by_step(success, recovery, symmetric):
    """From any round on: each link follows from its last state and its number of the exchange."""
    links = jaxfl.links(success, symmetric=symmetric, recovery=recovery)
    state, *others = arrivals(links, 60)
    for k, arrived in enumerate(others, start=1):
        keys = node_keys(purpose_key(KEY, Purpose.ARRIVAL, k), NODES)
        numbers = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (NODES,)))(keys)).T
        numbers = np.triu(numbers) + np.triu(numbers, 1).T if symmetric else numbers
        state = (numbers < np.where(state, np.float32(success), np.float32(recovery))) | ~OTHERS
        np.testing.assert_array_equal(arrived, state)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_recovery_equal_to_success_changes_no_bit(symmetric):
    independent = arrivals(jaxfl.links(0.7, symmetric=symmetric), 50)
    np.testing.assert_array_equal(arrivals(jaxfl.links(0.7, symmetric=symmetric, recovery=0.7), 50), independent)
    traced = jax.jit(lambda p: jaxfl.links(p, symmetric=symmetric, recovery=p).draw_between(KEY, 7, NODES).arrived)
    np.testing.assert_array_equal(jax.vmap(traced)(jnp.array([0.7, 0.2]))[0], independent[7])


def test_success_1_loses_nothing_success_0_everything():
    assert arrivals(jaxfl.links(jnp.where(jnp.eye(NODES, dtype=bool), 0.0, 1.0))).all()
    for links in (jaxfl.links(), jaxfl.links(np.ones(NODES)), jaxfl.links(np.ones((NODES, NODES)))):
        assert (links.may_lose, links.draw_between(KEY, 0, NODES).arrived) == (False, None), "nothing is drawn"
    assert jaxfl.links().draw_to_server(KEY, 0, NODES).arrived is None
    rounded, lossy = jaxfl.links(quantizer=uniform_quantizer(0.1)), jaxfl.links(0.9)
    assert [links.is_plain for links in (jaxfl.links(), rounded, lossy)] == [True, False, False]
    np.testing.assert_array_equal(arrivals(jaxfl.links(0.0), 50), np.broadcast_to(~OTHERS, (50, NODES, NODES)))
    traced = jax.jit(lambda success: jaxfl.links(success).draw_to_server(KEY, 0, 1000).arrived)
    assert traced(1.0).all()
    assert not at_server(jaxfl.links(0.0), 0, 1000).any()


@pytest.mark.parametrize("recovery", [None, 0.2])
def test_losses_and_rounding_do_not_depend_on_the_number_of_nodes(recovery):
    links = jaxfl.links(0.5, uniform_quantizer(0.1), recovery=recovery)
    np.testing.assert_array_equal(arrivals(links, 3), arrivals(links, 3, NODES + 3)[:, :NODES, :NODES])
    few, many = (links.send(jnp.full((n, 7), 0.04), links.draw_rounding(KEY, 3, n)).values for n in (NODES, NODES + 3))
    np.testing.assert_array_equal(few, many[:NODES])
    some, more = (at_server(links, 3, n) for n in (NODES, NODES + 3))
    np.testing.assert_array_equal(some, more[:NODES])


def test_losses_and_rounding_have_keys_of_their_own():
    """By the purposes ARRIVAL and MESSAGE_ROUNDING, so that no other stream of the run has their numbers."""
    draws = jaxfl.links(0.5, uniform_quantizer(0.1)).draw_to_server(KEY, 2, NODES)
    numbers = jax.vmap(jax.random.uniform)(node_keys(purpose_key(KEY, Purpose.ARRIVAL, 2), NODES))
    np.testing.assert_array_equal(draws.arrived, numbers < 0.5)
    expected = node_keys(purpose_key(KEY, Purpose.MESSAGE_ROUNDING, 2), NODES)
    assert isinstance(draws.rounding, RoundingKeys)
    assert (draws.rounding.keys == expected).all()


def test_what_is_sent_is_what_the_quantizer_makes_of_it():
    """With numbers of one's own; overflow counts by node, over leaves; without a quantizer nothing changes."""
    rng = np.random.default_rng(1)
    tree = {
        "a": jnp.asarray(rng.normal(size=(3, 4, 2)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=3), jnp.float32),
    }
    numbers = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(size=leaf.shape), jnp.float32), tree)
    quantizer = uniform_quantizer(0.25, levels=8)
    sent = jaxfl.links(quantizer=quantizer).send(tree, RoundingValues(numbers))
    for name in tree:
        np.testing.assert_array_equal(sent.values[name], quantizer.apply(tree[name], numbers[name]))
    beyond = [(leaf > 0.75) | (leaf < -1.0) for leaf in map(np.asarray, (tree["a"], tree["b"]))]
    expected = beyond[0].sum(axis=(1, 2)) + beyond[1]
    assert len(set(expected.tolist())) > 1, "nodes must differ for this test to mean something"
    np.testing.assert_array_equal(sent.counts[QUANTIZER_OVERFLOW], expected)
    plain = jaxfl.links(0.5).send(tree, None)
    assert not plain.counts
    assert all(plain.values[name] is tree[name] for name in tree)
    assert (jaxfl.links().bits, jaxfl.links(quantizer=quantizer).bits) == (32.0, 3.0)


@pytest.mark.statistical
def test_what_is_sent_is_unbiased_and_rounded_anew_for_every_number():
    values = jnp.full((NODES, 50, 40), 0.3, jnp.float32)
    both = {"first": values, "second": values}
    links = jaxfl.links(quantizer=uniform_quantizer(1.0))
    sent = links.send(both, links.draw_rounding(KEY, 0, NODES)).values
    rows = np.concatenate([np.asarray(leaf).reshape(NODES, -1) for leaf in sent.values()])
    assert set(np.unique(rows)) == {0.0, 1.0}
    error = 4.5 * np.sqrt(0.3 * 0.7 / rows.shape[1])
    np.testing.assert_allclose(rows.mean(axis=1), 0.3, atol=error)
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 4.5 / np.sqrt(rows.shape[1])


def test_a_traced_success_compiles_once_and_may_be_batched():
    traces = 0

    @jax.jit
    def arrived(success):
        nonlocal traces
        traces += 1
        return jaxfl.links(success).draw_between(KEY, 0, NODES).arrived

    rates = jnp.array([0.0, 0.3, 1.0])
    alone = [arrived(rate) for rate in rates]
    assert traces == 1
    np.testing.assert_array_equal(jax.vmap(arrived)(rates), alone)
    assert [int(one.sum()) for one in alone] == [NODES, int(arrivals(jaxfl.links(0.3), 1)[0].sum()), NODES**2]


test_refuses = refusals(
    [
        (lambda: jaxfl.links(1.1), "success"),
        (lambda: jaxfl.links(np.array([0.5, -0.1])), "success"),
        (lambda: jaxfl.links(np.ones((2, 3))), "success"),
        (lambda: jaxfl.links(np.ones((2, 2, 2))), "success"),
        (lambda: jaxfl.links(np.ones(3), symmetric=True), "success"),
        (lambda: jaxfl.links(np.ones(3)).draw_between(KEY, 0, 4), "success"),
        (lambda: jaxfl.links(np.ones((3, 3))).draw_between(KEY, 0, 4), "success"),
        (lambda: jaxfl.links(np.ones(3)).draw_to_server(KEY, 0, 4), "success"),
        (lambda: jaxfl.links(np.ones((4, 4))).draw_to_server(KEY, 0, 4), "success"),
        (lambda: jaxfl.links(0.5, recovery=1.1), "recovery"),
        (lambda: jaxfl.links(0.5, symmetric=True, recovery=np.full(3, 0.5)), "recovery"),
        (lambda: jaxfl.links(0.5, symmetric=True, recovery=np.array([[1.0, 0.5], [0.25, 1.0]])), "recovery"),
        (lambda: jaxfl.links(1.0, recovery=0.0), "recovery"),
        (lambda: jaxfl.links(0.5, recovery=np.full(3, 0.5)).draw_between(KEY, 0, 4), "recovery"),
        (lambda: jaxfl.links(0.5, recovery=np.full((4, 4), 0.5)).draw_to_server(KEY, 0, 4), "recovery"),
    ]
)


def test_names_the_pair_that_is_not_symmetric():
    success = np.array([[1.0, 0.5], [0.25, 1.0]])
    refused(lambda: jaxfl.links(success, symmetric=True), "success", "got 0.5 at (0, 1) and 0.25 at (1, 0)")
