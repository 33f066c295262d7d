"""Noise and rounds that keep every node of a network within its budget."""

import pytest

from jaxfl import privacy

OPTIONS = {"dp_delta": 1e-5, "num_nodes": 2}


def releases(*sizes, noise_std=0.0, **changes):
    release = privacy.Release("saga", "poisson", 4, 0, clip_norm=1.0, noise_std=noise_std, **changes)
    return tuple(release._replace(num_entries=size) for size in sizes)


def spent(noise_std, rounds, *sizes):
    noisy = releases(*sizes, noise_std=noise_std)
    return [privacy.epsilon(privacy.PRIVSGP_VR, "proven", release, rounds, **OPTIONS) for release in noisy]


@pytest.mark.parametrize("sizes", [(40, 80), (80, 40), (60,)])
def test_no_node_spends_more_than_its_budget(sizes):
    noise = privacy.calibrate_noise_std(
        privacy.PRIVSGP_VR, "proven", releases(*sizes), 10, target_epsilon=2.0, **OPTIONS
    )
    assert 1.98 < max(spent(noise, 10, *sizes)) <= 2.0
    assert max(spent(0.99 * noise, 10, *sizes)) > 2.0, "less noise must be too little for this to mean something"


def test_the_node_that_spends_most_decides_the_rounds():
    noisy = releases(40, 80, noise_std=1.0)
    rounds = privacy.max_rounds(privacy.PRIVSGP_VR, "proven", noisy, limit=500, target_epsilon=2.0, **OPTIONS)
    assert max(spent(1.0, rounds, 40, 80)) <= 2.0 < max(spent(1.0, rounds + 1, 40, 80))
    assert privacy.max_rounds(privacy.PRIVSGP_VR, "proven", noisy, limit=3, target_epsilon=2.0, **OPTIONS) == 3
