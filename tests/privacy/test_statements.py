"""Wording of statements: never an epsilon below the true one, and what it rests on beside it."""

import json

import numpy as np
import pytest

from jaxfl.privacy import clients, tracking
from jaxfl.privacy.gossip import A_DP2_SGD, PRIVSGP, PRIVSGP_VR, Release, account
from jaxfl.privacy.statements import REMARKS, asked_first, caption, rounded_down, rounded_up, statement_text
from jaxfl.privacy.tracking import TrackingRelease, exponential_schedule, perturbed_state_account

PROVEN = {
    "bound": "proven",
    "dp_epsilon": 2.5,
    "dp_delta": 1e-5,
    "neighboring_relation": "zero_out",
    "assumptions": ("one run",),
}
NONE = {**PROVEN, "dp_epsilon": None, "reason": "Nothing is clipped."}
ASSUMED = {**PROVEN, "assumptions": ("one run", "gradients stay below 3: assumed, not enforced")}
REFUTED = {**PROVEN, "assumptions": ("refuted at this noise: it leaks epsilon 7.5",)}
KEY = "proven (zero out one sample, δ = 1e-05)"


@pytest.mark.parametrize(
    ("value", "digits", "up", "down"),
    [
        (2.00049, 4, "2.001", "2"),
        (8.0, 4, "8", "8"),
        (0.1, 3, "0.1", "0.1"),
        (0.12301, 3, "0.124", "0.123"),
        (9.9999, 3, "10", "9.99"),
        (124_150.0, 4, "1.242e+05", "1.241e+05"),
        (1.0000000001e-7, 3, "1.01e-07", "1e-07"),
        (0.0, 4, "0", "0"),
    ],
)
def test_an_epsilon_is_rounded_up_and_a_lower_bound_down(value, digits, up, down):
    assert rounded_up(value, digits) == up
    assert rounded_down(value, digits) == down
    assert float(down) <= value <= float(up)


def test_the_epsilon_is_rounded_up():
    assert statement_text({**PROVEN, "dp_epsilon": 2.00049}) == "ε = 2.001 proven (zero out one sample, δ = 1e-05)"
    assert caption({"VR": [{**PROVEN, "dp_epsilon": 2.001}]}) == [f"{KEY}: VR: ε = 2.01"]


def test_an_epsilon_on_an_assumed_bound_or_one_that_is_refuted_says_so():
    assert statement_text(ASSUMED) == "ε = 2.5 proven (zero out one sample, δ = 1e-05, assumed bound)"
    assert statement_text(REFUTED) == "ε = 2.5 proven (zero out one sample, δ = 1e-05, refuted at this noise)"
    both = {**PROVEN, "assumptions": ASSUMED["assumptions"] + REFUTED["assumptions"]}
    assert statement_text(both).endswith("δ = 1e-05, assumed bound, refuted at this noise)")
    assert caption({"VR": [both]}) == [f"{KEY}: VR: ε = 2.5; assumed bound; refuted at this noise"]


def test_an_epsilon_above_100_says_that_it_protects_nothing():
    large = {**PROVEN, "dp_epsilon": 100.1}
    assert "protects nothing" in statement_text(large)
    assert "protects nothing" not in statement_text({**PROVEN, "dp_epsilon": 100.0})
    assert caption({"A": [large], "B": [PROVEN]})[0].endswith("protects nothing: A")


def large(statements):
    """The statements that say what their delta allows, in the text that every command prints."""
    remark = "a mechanism that publishes one of them at random satisfies this"
    assert all((remark in statement_text(one)) == (remark in "".join(one["assumptions"])) for one in statements)
    assert all(
        (remark in line) == (remark in statement_text(one)) for one in statements for line in caption({"A": [one]})
    )
    return [remark in statement_text(one) for one in statements]


def test_a_delta_that_allows_to_publish_a_record_says_so():
    """In every family: samples of all nodes, or clients, times delta are 1 or more."""

    def rows(stated):
        return [one._asdict() for one in stated if one.dp_epsilon is not None]

    release = Release("mini_batch", "poisson", 5, 50, clip_norm=1.0, noise_std=0.4)
    for delta, actual in ((0.1, True), (0.01, True), (0.0099, False)):  # of 100 samples
        assert set(large(rows(account(PRIVSGP, [release] * 2, dp_delta=delta).statements(10)))) == {actual}
        two_seeds = account(PRIVSGP, [release] * 4, dp_delta=delta, num_nodes=2)  # with the same samples
        assert set(large(rows(two_seeds.statements(10)))) == {actual}
    text = statement_text(rows(account(PRIVSGP, [release] * 2, dp_delta=0.1).statements(10))[-1])
    assert "delta 0.1 times 100 samples is 10: a mechanism that publishes one of them at random satisfies this" in text
    many = release._replace(num_entries=50_000, batch_size=500)
    assert all(large(rows(account(PRIVSGP, [many] * 2, dp_delta=1e-5).statements(10))))
    assert not any(large(rows(account(PRIVSGP, [many], dp_delta=1e-5).statements(10))))
    client = clients.ClientRelease("poisson", num_samples=50, batch_size=5, clip_norm=1.0, noise_multiplier=2.0)
    assert all(large(rows(clients.account([client] * 2, dp_delta=0.01).statements(10))))
    assert not any(large(rows(clients.account([client] * 2, dp_delta=0.0099).statements(10))))
    whole = clients.UpdateRelease("poisson", 0.1, clip_norm=1.0, noise_multiplier=2.0)
    for number, actual in ((99, False), (100, True)):
        (one,) = rows(clients.client_level_account(whole, num_clients=number, dp_delta=0.01).statements(10))
        assert large([one]) == [actual]
        assert ("100 clients" in statement_text(one)) == actual
    schedule = exponential_schedule(4, state_noise_base=0.9, tracker_noise_base=0.9)
    gaussian = TrackingRelease(clip_norm=1.0, distribution="gaussian")
    weights = {"state_in_weights": np.ones(2), "tracker_out_weights": np.ones(2)}
    for size, actual in ((50, True), (49, False)):
        settings: dict = {"dp_delta": 0.01, "num_local_samples": [size] * 2}
        stated = tracking.gradient_tracking_account(schedule, gaussian, **weights, **settings).statements(4)
        for function in (perturbed_state_account, tracking.output_perturbation_account):
            stated += function(schedule, gaussian, num_nodes=2, **settings).statements(4)
        assert set(large(rows(stated))) == {actual}
    coarse = tracking.quantization_account(
        schedule, TrackingRelease(clip_norm=1e-3), num_nodes=2, quantization_step=0.5, num_local_samples=[50, 50]
    ).statements(1)
    assert large(rows(coarse)) == [one.dp_delta >= 0.01 for one in coarse]


def test_what_has_no_epsilon_has_a_reason_and_no_remark():
    without = {**NONE, "assumptions": ASSUMED["assumptions"]}
    assert statement_text(without) == "no proven ε (zero out one sample, δ = 1e-05): Nothing is clipped."
    assert caption({"VR": [without]}) == [f"{KEY}: no ε"]


@pytest.mark.parametrize("more", [0, 4])
def test_rows_without_noise_are_told_from_rows_without_an_epsilon(more):
    """In a line that names each case, and in one that counts them."""
    quiet = Release("mini_batch", "poisson", 5, 50, clip_norm=1.0, noise_std=0.0)
    silent = [one._asdict() for one in account(PRIVSGP, [quiet], dp_delta=1e-5).statements(10)][-1:]
    (key,) = [line.removesuffix(": no noise, no ε") for line in caption({"alone": silent})]
    unclipped = {**silent[0], "reason": NONE["reason"]}
    others = {f"v{i}": [{**silent[0], "dp_epsilon": 2.5, "reason": None}] for i in range(1 + more)}
    (line,) = caption({**others, "alone": silent, "without_noise": silent, "free": [unclipped]})
    if more:
        assert line == f"{key}: ε = 2.5 (2 without noise: no ε holds) (1 without ε)"
    else:
        assert line == f"{key}: v0: ε = 2.5 | alone: no noise, no ε | without_noise: no noise, no ε | free: no ε"


def test_the_statement_that_was_asked_for_is_first_and_marked():
    published = {**NONE, "bound": "published"}
    replaced = {**PROVEN, "neighboring_relation": "replace_one"}
    for relation, expected in (("replace_one", replaced), ("zero_out", PROVEN), (None, PROVEN)):
        first, *others = asked_first([published, PROVEN, replaced], "proven", relation)
        assert first == {**expected, "asked": True}
        assert others == [one for one in (published, PROVEN, replaced) if one != expected]
        assert statement_text(first).startswith("target: ε = 2.5 proven (")
    assert asked_first([published, PROVEN], "reconstructed") == [published, PROVEN]
    of_run = {"A": [published, PROVEN], "B": asked_first([published, PROVEN], "proven")}
    assert caption(of_run) == [
        f"target: {KEY}: B: ε = 2.5",
        "published (zero out one sample, δ = 1e-05): no ε",
        f"{KEY}: A: ε = 2.5",
    ]


def test_a_median_far_below_the_worst_node_is_told():
    near, far = ({**PROVEN, "dp_epsilon_median_node": median} for median in (2.4, 1.0))
    assert statement_text(near) == statement_text(PROVEN)
    assert statement_text(far).startswith("ε = 2.5 at the worst node, median 1, proven (")
    assert caption({"VR": [far]}) == [f"{KEY}: VR: ε = 2.5 at the worst node, median 1"]
    assert caption({"A": [far], "B": [far]}) == [f"{KEY}: ε = 2.5 at the worst node, median 1, for each case"]
    beside = {"C": [{**PROVEN, "observer": "a server"}]}
    assert caption({"A": [far], "B": [near], **beside})[0] == f"{KEY}: ε = 2.5 for A | B"
    assert caption({"A": [far], "B": [near]}) == [f"{KEY}: ε = 2.5 for each case"]


def test_a_remark_names_the_cases_it_is_on():
    assert caption({"A": [ASSUMED], "B": [NONE]}) == [f"{KEY}: A: ε = 2.5 | B: no ε; assumed bound: A"]
    assert caption({"A": [ASSUMED], "B": [PROVEN]}) == [f"{KEY}: ε = 2.5 for each case; assumed bound: A"]
    many = {f"v{i}": [REFUTED if i else PROVEN] for i in range(6)}
    assert caption(many) == [f"{KEY}: ε = 2.5 for each case; refuted at this noise: 5 cases"]


def test_the_remarks_are_found_in_what_the_accountant_states():
    """Check real statements, as summary.json holds them: a bound that is assumed, a noise that is too small, and a
    number that is no bound."""
    paper = Release("saga", "uniform", 1, 3125, clip_norm=10.0, noise_std=0.2259, assumed=True)
    published, *others = [one._asdict() for one in account(PRIVSGP_VR, [paper], dp_delta=1e-5).statements(3120)]
    text = statement_text(json.loads(json.dumps(published)))
    assert " published against all other nodes (replace one sample, δ = 1e-05" in text
    assert text.startswith("ε = 3 ") or text.startswith("ε = 3.00")
    release = TrackingRelease(clip_norm=1.0, gradient_at="state")
    schedule = exponential_schedule(4, state_noise_base=0.9, tracker_noise_base=0.9)
    of_tracking = perturbed_state_account(schedule, release, num_nodes=2).statements(4)[0]
    text += statement_text(of_tracking._asdict())
    plain = Release("mini_batch", "poisson", 4, 100, clip_norm=1.0, noise_std=0.5)
    text += statement_text(account(A_DP2_SGD, [plain] * 4, dp_delta=1e-5).statements(10)[0]._asdict())
    assert all(remark in text for remark in REMARKS.values())
    assert all(statement_text(one).startswith("no proven ε") for one in others)


def test_noise_without_a_clip_norm_says_that_it_protects_nothing():
    plain = Release("mini_batch", "poisson", 5, 50, clip_norm=None, noise_std=0.4)
    client = clients.ClientRelease("poisson", num_samples=50, batch_size=5, clip_norm=None, noise_multiplier=2.0)
    whole = clients.UpdateRelease("poisson", 0.1, clip_norm=None, noise_multiplier=2.0)
    schedule = exponential_schedule(4, state_noise_base=0.9, tracker_noise_base=0.9)
    stated = [
        *account(PRIVSGP, [plain], dp_delta=1e-5).statements(10),
        *clients.account([client], dp_delta=1e-5).statements(10),
        *clients.client_level_account(whole, num_clients=9, dp_delta=1e-5).statements(10),
        *perturbed_state_account(schedule, TrackingRelease(clip_norm=None), num_nodes=2).statements(4),
    ]
    proven = [one._asdict() for one in stated if one.bound == "proven"]
    assert len(proven) == 6
    assert all(
        "not clipped" in statement_text(one) and "noise protects nothing" in statement_text(one) for one in proven
    )


def test_an_epsilon_names_its_observer_and_no_picture_puts_two_observers_on_one_line():
    near, far = ({**PROVEN, "observer": observer} for observer in ("all other nodes", "an outside observer"))
    assert statement_text(far) == "ε = 2.5 proven against an outside observer (zero out one sample, δ = 1e-05)"
    lines = caption({"A": [near], "B": [far]})
    assert [line.split(" (")[0] for line in lines] == [f"proven against {one['observer']}" for one in (near, far)]
