"""Statements about gradient tracking and the methods it is compared with: what has left, for whom, and why not."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxfl import ArgumentError
from jaxfl.privacy import tracking
from jaxfl.privacy.statements import ASSUMED, statement_text
from jaxfl.privacy.tracking import (
    NO_BOUND,
    TrackingAgent,
    TrackingRelease,
    TrackingSchedule,
    gaussian_shift,
    gradient_tracking_account,
    output_perturbation_account,
    perturbed_state_account,
    quantization_account,
)

K, NODES, CLIP, DELTA = 30, 3, 0.75, 1e-5
RECEIVED, SENT = np.array([1.5, 1.0, 0.4]), np.array([0.8, 0.0, 1.3])
SCALES = np.random.default_rng(0).uniform(0.5, 2.0, (2, NODES, K + 1))
SCHEDULE = TrackingSchedule(0.3, 0.2, 0.25, 4, SCALES[0], SCALES[1])
AGENTS = TrackingAgent(2 * CLIP, RECEIVED, SENT)
CLIPPED = TrackingRelease(clip_norm=CLIP)
AT_STATE = CLIPPED._replace(gradient_at="state")


def tracked(num_rounds=K, release=CLIPPED, schedule=SCHEDULE, **options):
    return gradient_tracking_account(
        schedule, release, state_in_weights=RECEIVED, tracker_out_weights=SENT, **options
    ).statements(num_rounds)


def perturbed(num_rounds=K, release=CLIPPED, schedule=SCHEDULE, **options):
    return perturbed_state_account(schedule, release, num_nodes=NODES, **options).statements(num_rounds)


def output(num_rounds=K, release=CLIPPED, schedule=SCHEDULE, **options):
    return output_perturbation_account(schedule, release, num_nodes=NODES, **options).statements(num_rounds)


def quantized(num_rounds=K, release=CLIPPED, schedule=SCHEDULE, quantization_step=10.0):
    return quantization_account(schedule, release, num_nodes=NODES, quantization_step=quantization_step).statements(
        num_rounds
    )


METHODS: dict[str, Any] = {"tracking": tracked, "perturbed": perturbed, "output": output, "quantized": quantized}
WITH_NOISE = {name: method for name, method in METHODS.items() if method is not quantized}


def epsilon(statement):
    """The number, which there must be."""
    assert statement.dp_epsilon is not None
    return statement.dp_epsilon


def reason(statement):
    """Why there is none."""
    assert statement.dp_epsilon is None
    assert statement.reason is not None
    return statement.reason


def worst(sensitivities, num_states, num_trackers):
    """max over agents of the sum over x~_0, ..., and y~_0, ..., so many of each."""
    state = (sensitivities.state / SCALES[0])[:, :num_states].sum(axis=1)
    return (state + (sensitivities.tracker / SCALES[1])[:, :num_trackers].sum(axis=1)).max()


@pytest.mark.parametrize("rounds", [1, 7, K, K + 1])
@pytest.mark.parametrize("release", [CLIPPED, AT_STATE], ids=["broadcast", "state"])
def test_epsilon_is_that_of_the_worst_agent_of_what_has_left_it(rounds, release):
    ahead = 1 if release is CLIPPED else 0  # of x~, the last of which is returned
    statements = tracked(rounds, release)
    published, proven = (
        bound(SCHEDULE, AGENTS) for bound in (tracking.published_sensitivities, tracking.proven_sensitivities)
    )
    np.testing.assert_allclose(epsilon(statements[0]), worst(published, rounds + ahead, rounds), rtol=1e-12)
    if release is CLIPPED:
        np.testing.assert_allclose(epsilon(statements[1]), worst(proven, rounds + 1, rounds), rtol=1e-12)
    moves = tracking.perturbed_state_sensitivities(SCHEDULE, 2 * CLIP)
    actual = epsilon(perturbed(rounds, release)[0])
    np.testing.assert_allclose(actual, worst(moves, rounds + ahead, 0), rtol=1e-12, atol=1e-12)
    moves = tracking.output_sensitivities(SCHEDULE, 2 * CLIP)
    for statement in output(rounds, release):
        np.testing.assert_allclose(epsilon(statement), worst(moves, rounds, 0), rtol=1e-12)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_nothing_is_spent_in_0_rounds_and_more_never_costs_less(method):
    for release in (CLIPPED, AT_STATE, TrackingRelease(clip_norm=None)):
        for statement in method(0, release):
            assert (statement.dp_epsilon, statement.dp_delta, statement.reason) == (0.0, 0.0, None)
    spent = [[(s.dp_epsilon, s.dp_delta) for s in method(rounds)] for rounds in range(6)]
    assert all(np.less_equal(few, more).all() for few, more in itertools.pairwise(spent))
    assert spent[-1] != spent[0]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_statements_say_what_they_are(method):
    actual = method()
    stated = "published" if method is METHODS["tracking"] else "reconstructed"
    assert [s.bound for s in actual][:2] == [stated, "proven"]
    for statement in actual:
        assert statement.neighboring_relation == "replace_one"
        assert statement.nodes == NODES
        assert any("are clipped to the L1 norm 0.75" in text for text in statement.assumptions)
        assert NO_BOUND not in statement.assumptions
        statement_text(statement._asdict())
    assert epsilon(actual[1]) <= epsilon(actual[0])
    assert actual[1].dp_delta <= actual[0].dp_delta


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_proven_at_the_own_state_and_published_says_so(name):
    published, proven = METHODS[name](release=AT_STATE)
    if name == "output":  # the own state is known there
        assert published[1:] == METHODS[name]()[0][1:]
        assert proven.dp_epsilon is not None
        return
    assert NO_BOUND in published.assumptions
    assert published.dp_epsilon is not None
    assert "un-noised state" in reason(proven)
    assert proven.accountant == "none"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_without_clipping_there_is_a_reason_and_no_epsilon(method):
    for statement in method(release=TrackingRelease(clip_norm=None)):
        assert "not clipped" in reason(statement)
    published, proven = method(release=CLIPPED._replace(assumed=True))
    assert published[1:3] == method()[0][1:3]
    assert any(ASSUMED in text for text in published.assumptions)
    assert "assumed bound" in statement_text(published._asdict()) or published.dp_epsilon is None
    assert "not clipped" in reason(proven)


@pytest.mark.parametrize("method", WITH_NOISE.values(), ids=WITH_NOISE)
def test_absent_noise_is_a_reason_only_where_it_has_been_sent(method):
    scales = SCALES[0].copy()
    scales[1, 10] = 0.0
    silent = SCHEDULE._replace(state_noise_scale=scales)
    for statement in method(12, schedule=silent):
        assert "carries no noise" in reason(statement)
    assert [s.dp_epsilon for s in method(9, schedule=silent)] == [s.dp_epsilon for s in method(9)]


def test_trackers_without_noise_matter_to_gradient_tracking_alone():
    silent = SCHEDULE._replace(tracker_noise_scale=np.zeros(K + 1))
    assert all(s.dp_epsilon is None for s in tracked(schedule=silent))
    assert perturbed(schedule=silent) == perturbed()
    assert output(schedule=silent) == output()


LARGE = SCHEDULE._replace(state_noise_scale=SCALES[0] / 10, tracker_noise_scale=SCALES[1] / 10)
SMALL = SCHEDULE._replace(state_noise_scale=20 * SCALES[0], tracker_noise_scale=20 * SCALES[1])


def sent_of(schedule):
    """After K rounds."""
    trackers = np.where(np.arange(K + 1) < K, schedule.tracker_noise_scale, np.inf)
    return schedule._replace(tracker_noise_scale=trackers)


@pytest.mark.parametrize(
    ("schedule", "name"),
    [(LARGE, "added up, of the iterations"), (SMALL, "zero-concentrated DP")],
    ids=["large", "small"],
)
def test_at_a_delta_the_smallest_bound_is_stated_each_agent_with_its_own_samples(schedule, name):
    sizes = [400, 40, 4000]
    *others, actual = tracked(schedule=schedule, dp_delta=DELTA, num_local_samples=sizes)
    assert others == tracked(schedule=schedule)
    assert (actual.bound, actual.dp_delta, actual.neighboring_relation) == ("proven", DELTA, "replace_one")
    settings = {"num_local_samples": np.array(sizes), "dp_delta": DELTA}
    added = tracking.participation_epsilon(sent_of(schedule), AGENTS, **settings)
    composed = tracking.laplace_epsilon_at_delta(sent_of(schedule), AGENTS, **settings)(1.0)
    assert epsilon(actual) == min(added.max(), composed.max()) < epsilon(others[1])
    assert name in actual.accountant
    assert any("binomial" in text for text in actual.assumptions)
    at_state = tracked(release=AT_STATE, dp_delta=DELTA, num_local_samples=sizes)[2]
    assert (at_state.dp_epsilon, at_state.dp_delta) == (None, DELTA)
    assert "un-noised state" in reason(at_state)


def test_at_a_delta_without_sizes():
    *others, actual = tracked(schedule=SMALL, dp_delta=DELTA)
    assert others == tracked(schedule=SMALL)
    assert epsilon(actual) == tracking.laplace_epsilon_at_delta(sent_of(SMALL), AGENTS, dp_delta=DELTA)(1.0).max()
    assert epsilon(actual) < epsilon(others[1])
    assert "zero-concentrated" in actual.accountant
    assert not any("binomial" in text for text in actual.assumptions)
    plain = tracked(dp_delta=DELTA)
    np.testing.assert_allclose(epsilon(plain[2]), epsilon(plain[1]), rtol=1e-12)
    assert plain[2].accountant.endswith("Laplace mechanisms added up"), "delta buys nothing there"
    assert tracked(0, dp_delta=DELTA)[2][1:3] == (0.0, 0.0)


def test_gaussian_noise_is_proven_at_a_delta_and_never_published():
    normal = CLIPPED._replace(distribution="gaussian")
    for method, sensitivities in [
        (tracked, tracking.proven_sensitivities(SCHEDULE, AGENTS)),
        (perturbed, tracking.perturbed_state_sensitivities(SCHEDULE, 2 * CLIP)),
        (output, tracking.output_sensitivities(SCHEDULE, 2 * CLIP)),
    ]:
        published, proven = method(release=normal, dp_delta=DELTA)
        assert published.dp_epsilon is None
        assert proven.dp_delta == DELTA
        sent = (SCALES[0][:, :-1], SCALES[1][:, :-1]) if method is output else (SCALES[0], SCALES[1])
        rounds = np.arange(sent[0].shape[1])
        trackers = np.where(rounds < K, sent[1], np.inf)
        cut = SCHEDULE._replace(state_noise_scale=sent[0], tracker_noise_scale=trackers)
        moves = tracking.Sensitivities(*(change[..., : len(rounds)] for change in sensitivities))
        singly = tracking.shifted_epsilon(gaussian_shift(cut, moves), DELTA).max()
        if method is tracked:
            jointly = tracking.shifted_epsilon(tracking.joint_shift(cut, AGENTS), DELTA).max()
            assert epsilon(proven) == jointly < singly
            assert "Gram matrix" in proven.accountant
        else:
            np.testing.assert_allclose(epsilon(proven), singly, rtol=1e-9)
        assert any("L2 norm 0.75" in text for text in proven.assumptions)
        with pytest.raises(ArgumentError, match=r"^dp_delta: "):
            method(release=normal)


def test_quantization_spends_delta_until_it_reaches_1():
    moves = tracking.perturbed_state_sensitivities(SCHEDULE, 2 * CLIP).state
    published, proven = quantized(5)
    np.testing.assert_allclose(published.dp_delta, moves[:6].sum() / 10, rtol=1e-12)
    np.testing.assert_allclose(proven.dp_delta, 1 - np.prod(1 - moves[:6] / 10), rtol=1e-12)
    assert published.dp_epsilon == proven.dp_epsilon == 0.0
    np.testing.assert_allclose(quantized(5, AT_STATE)[0].dp_delta, moves[:5].sum() / 10, rtol=1e-12)
    spent, coupled = quantized(K, quantization_step=1.0)
    reached = int(np.argmax(np.cumsum(moves) >= 1))
    assert spent.dp_delta == 1.0
    assert f"broadcast {reached}," in reason(spent)
    assert coupled.dp_delta < 1
    longer = quantized(3 * K)  # noise, and so the schedule's length, does not matter
    assert longer[1].dp_delta > proven.dp_delta


def test_every_agent_has_an_epsilon_of_its_own():
    """Agents of a directed pair differ in what they send, and so in what it costs."""
    for statement in tracked():
        own = statement.node_epsilons
        assert len(own) == NODES
        assert max(own) == statement.dp_epsilon
    assert len(set(tracked()[0].node_epsilons)) > 1
    assert tracked(release=TrackingRelease(clip_norm=None))[0].node_epsilons == ()


BUDGETED = {  # method -> distributions and bounds that can hold a budget
    "tracking": (("laplace", "proven"), ("laplace", "published"), ("gaussian", "proven")),
    "perturbed": (("laplace", "proven"), ("laplace", "published"), ("gaussian", "proven")),
    "output": (("laplace", "proven"), ("gaussian", "proven")),
}
BUDGETS = [(name, *case) for name, cases in BUDGETED.items() for case in cases]


def stated_at(factor, name, distribution, bound):
    """The statement that a budget is held by, with all noise times a factor."""
    noise = {field: factor * getattr(SCHEDULE, field) for field in ("state_noise_scale", "tracker_noise_scale")}
    options = {"dp_delta": DELTA} | ({"num_local_samples": [40, 80, 400]} if name == "tracking" else {})
    actual = METHODS[name](K, CLIPPED._replace(distribution=distribution), SCHEDULE._replace(**noise), **options)
    return [one for one in actual if (one.bound == "proven") == (bound == "proven")][-1]


@pytest.mark.parametrize(("name", "distribution", "bound"), BUDGETS)
@pytest.mark.parametrize("target", [0.3, 8.0])
def test_the_least_noise_meets_a_budget_and_less_does_not(name, distribution, bound, target):
    weights = {"num_nodes": NODES}
    if name == "tracking":
        weights = {"state_in_weights": RECEIVED, "tracker_out_weights": SENT, "num_local_samples": [40, 80, 400]}
    function = {
        "tracking": gradient_tracking_account,
        "perturbed": perturbed_state_account,
        "output": output_perturbation_account,
    }[name]
    run = function(SCHEDULE, CLIPPED._replace(distribution=distribution), dp_delta=DELTA, **weights)
    factor = run.calibrate(K, target, bound) * (1 + 1e-12)  # what multiplying in another order rounds away
    assert epsilon(stated_at(factor, name, distribution, bound)) <= target
    assert epsilon(stated_at(0.998 * factor, name, distribution, bound)) > target
    at_a_delta = bound == "proven" and (name == "tracking" or distribution == "gaussian")
    assert stated_at(factor, name, distribution, bound).dp_delta == (DELTA if at_a_delta else 0)


@pytest.mark.parametrize(
    ("bound", "changes", "why"),
    [
        ("proven", {"gradient_at": "state"}, "un-noised state"),
        ("proven", {"assumed": True}, "not clipped"),
        ("published", {"distribution": "gaussian"}, "Laplace"),
    ],
)
def test_a_budget_of_a_bound_that_there_is_not_is_refused(bound, changes, why):
    run = perturbed_state_account(SCHEDULE, CLIPPED._replace(**changes), num_nodes=NODES, dp_delta=DELTA)
    with pytest.raises(ArgumentError, match=f"bound: must exist .* {why}"):
        run.calibrate(K, 1.0, bound)
