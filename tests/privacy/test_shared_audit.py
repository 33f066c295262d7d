"""The audit of noise that pairs of nodes share: right runs pass, and a fault in one pair of five is refused."""

import pytest
from planted_faults import Drawn, Fault, planted

from experiments.audit import attack
from experiments.audit.methods import METHODS
from experiments.audit.options import Configuration
from jaxfl.core import Purpose, purpose_key
from jaxfl.frame import Row, override
from jaxfl.privacy import key_graph
from jaxfl.privacy.mechanisms import standard_noise
from jaxfl.privacy.shared import calibrated

jax = pytest.importorskip("jax")
pytest.importorskip("jax_privacy.auditing")
PAIRS, RATIO = "PrivSGP in pairs", 2.0
SMALL = {"method": PAIRS, "canaries": 500, "samples": 50, "iterations": 8}
FACTOR, _ = calibrated(key_graph("ring", 5), ratio=RATIO, colluding=0)


def of_pairs(drawn: Drawn, number, index: int = 1):
    """Noise r of the pairs (i, i + 1), a row each, in one round; another index is a draw that no pair has."""
    key = purpose_key(purpose_key(drawn.key, Purpose.NOISE, number), Purpose.SHARED_NOISE, index)
    drawn_now = standard_noise(key, drawn.leaves, lambda node, size: jax.random.normal(node, (size,), "float32"))
    return {name: RATIO * FACTOR * drawn.std * leaf for name, leaf in drawn_now.items()}


def without_half(drawn):
    return {name: drawn.leaves[name].at[1].add(r[0]) for name, r in of_pairs(drawn, drawn.round).items()}


def wrong_sign(drawn):
    return {name: drawn.leaves[name].at[1].add(2 * r[0]) for name, r in of_pairs(drawn, drawn.round).items()}


def drawn_twice(drawn):
    more = of_pairs(drawn, drawn.round, index=2)
    return {name: drawn.leaves[name].at[0].add(r[0]).at[1].add(-r[0]) for name, r in more.items()}


def seed_reused(drawn):
    """The pair (0, 1) has the numbers of round 0 in every round."""
    now, first = of_pairs(drawn, drawn.round), of_pairs(drawn, 0)
    change = {name: first[name][0] - now[name][0] for name in now}
    return {name: leaf.at[0].add(change[name]).at[1].add(-change[name]) for name, leaf in drawn.leaves.items()}


def audited(monkeypatch, fault, seed):
    right = METHODS[PAIRS]

    def learner(config, task, numbers, noise_std):
        made = right.learner(config, task, numbers, noise_std)
        return made if fault is None else made._replace(algorithm=planted(made.algorithm, Fault(fault), noise_std))

    ready = attack.ready(Row(override(Configuration(), {**SMALL, "seed": seed}), (seed,), {}))
    assert ready.claim.observer == "an outside observer"
    monkeypatch.setitem(METHODS, PAIRS, right._replace(learner=learner))
    return attack.measured(ready, 1).result.checks


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 1])
def test_a_right_run_passes(monkeypatch, seed):
    assert not [check.name for check in audited(monkeypatch, None, seed) if check.refuted]


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (without_half, "noise of layers"),
        (wrong_sign, "noise of layers"),
        (drawn_twice, "noise of layers"),
        (seed_reused, "repeated noise"),
    ],
)
def test_a_fault_in_one_pair_is_refused(monkeypatch, fault, kind):
    refuted = [check.name for check in audited(monkeypatch, fault, 0) if check.refuted]
    assert any(name.startswith(kind) for name in refuted), refuted
