"""Wireless links of devices in a cell: places of devices, and the probability that a message arrives.

With P the transmit power, N_0 the noise in a hertz, W the bandwidth of a device, R its rate and r its distance:

    path loss     L(r) = 128.1 + 37.6 log10(r / 1 km) dB
    SNR           P - L(r) - (N_0 + 10 log10 W) dB, its mean over the fading
    success       p = P(W log2(1 + SNR |h|^2) >= R) = exp(-(2^(R / W) - 1) / SNR), Rayleigh fading: |h|^2 is Exp(1)

Under new fading a message that is sent until it arrives is sent 1 / p times in the mean, in parts or as a whole.

Messages of farther devices arrive less often. A server that weights the |S| of N messages that arrive by N / |S|
assumes one p for all: with the success probabilities of these distances its sum is biased towards nearby devices.

Sources of the numbers: DZOFL's paper (below) gives a disc of 500 m, 2 MHz a device, -173 dBm/Hz and Rayleigh fading,
and in the example of section III 10 Mbit/s. The law of path loss (3GPP TR 36.814, annex A: a large cell at 2 GHz) and
the power of 23 dBm (LTE phones) are chosen here: the paper says "a standard channel model". At 10 Mbit/s p is 0.476 on
the rim and 0.791 in the mean of the disc.

References:
    E. Mhanna, M. Assaad, "Communication and Energy Efficient Federated Learning using Zero-Order Optimization
    Technique": sections III and V.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import Array, check
from jaxfl.core.keys import Key, Purpose, node_keys, purpose_key

RADIUS_M = 500.0
_POSITIONS = 2**31 - 1  # random graphs count their attempts from 0 under the same key purpose


class Radio(NamedTuple):
    """The link of every device to its receiver; each number may be traced."""

    bits_per_second: float | Array = 10e6  # R
    bandwidth_hz: float | Array = 2e6  # W
    power_dbm: float | Array = 23.0  # P, 0.2 W
    noise_dbm_per_hz: float | Array = -173.0  # N_0
    path_loss_db: float | Array = 128.1  # at 1 km
    path_loss_exponent: float | Array = 3.76  # 37.6 dB for ten times the distance


def disc_positions(key: Key, num_nodes: int, radius_m: float | Array = RADIUS_M) -> Array:
    """Draw the places of devices, independent and uniform in a disc around the origin.

    Args:
        key: typed base key of the run, or its `RunKey`: runs of one base key have their devices in the same places.
        num_nodes: n, at least 1.
        radius_m: of the disc, meters.

    Returns:
        (n, 2), float32, meters. `jnp.linalg.norm(positions, axis=1)` gives the distances to a server in the center.

    Raises:
        ArgumentError: a number out of range.

    Guarantees:
        - a node's place does not depend on the number of nodes.
        - squared distances are uniform on [0, radius^2], and directions uniform.

    Examples:
        >>> positions = disc_positions(jax.random.key(0), 50)
        >>> positions.shape, bool((jnp.linalg.norm(positions, axis=1) <= 500).all())
        ((50, 2), True)
    """
    check.at_least(1, num_nodes=num_nodes)
    check.positive(radius_m=radius_m)
    keys = node_keys(purpose_key(key, Purpose.GRAPH, _POSITIONS), num_nodes)
    share, turn = jax.vmap(lambda node_key: jax.random.uniform(node_key, (2,), jnp.float32))(keys).T
    angle = 2 * jnp.pi * turn
    return (radius_m * jnp.sqrt(share))[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def mean_snr(distance_m: float | Array, radio: Radio) -> Array:
    """Signal-to-noise ratio at a distance, its mean over the fading.

    Args:
        distance_m: r, meters, any shape.
        radio: the link.

    Returns:
        The ratio, without unit (not in dB), in the shape of the distances; infinite at 0 m.

    Raises:
        ArgumentError: a number out of range.

    Examples:
        >>> round(float(mean_snr(500.0, Radio())), 3)
        41.768
    """
    check.non_negative(distance_m=distance_m)
    radio = _float32(radio)
    distance_m = jnp.asarray(distance_m, jnp.float32)
    loss_db = radio.path_loss_db + 10 * radio.path_loss_exponent * jnp.log10(distance_m / 1000)
    return 10 ** ((radio.power_dbm - loss_db - noise_dbm(radio)) / 10)


def noise_dbm(radio: Radio) -> Array:
    """Power of the noise in a device's bandwidth, dBm, shape ().

    Examples:
        >>> round(float(noise_dbm(Radio())), 2)
        -109.99
    """
    radio = _float32(radio)
    return radio.noise_dbm_per_hz + 10 * jnp.log10(radio.bandwidth_hz)


def success_probability(distance_m: float | Array, radio: Radio) -> Array:
    """Probability that a message arrives when it is sent once.

    Args:
        distance_m: r, meters, any shape: (n,) to a server, (n, n) between nodes.
        radio: the link.

    Returns:
        float32 in [0, 1], in the shape of the distances, as `jaxfl.links(success=...)` takes it.

    Raises:
        ArgumentError: a number out of range.

    Guarantees:
        - equals the share of random fadings under which the channel carries the rate.
        - 1 at 0 m; less with distance and with rate, more with power.

    Examples:
        >>> [round(float(success_probability(500.0, Radio(rate))), 5) for rate in (10e6, 4e6, 1e6, 128e3)]
        [0.47607, 0.93069, 0.99013, 0.99891]
    """
    return jnp.exp(-_threshold(radio) / mean_snr(distance_m, radio))


def _threshold(radio: Radio) -> Array:
    """The signal-to-noise ratio that carries the rate, 2^(R / W) - 1."""
    radio = _float32(radio)
    return jnp.expm1(math.log(2) * radio.bits_per_second / radio.bandwidth_hz)


def _float32(radio: Radio) -> Radio:
    """Check a radio's numbers, and return them as arrays; powers in dBm may have any sign."""
    powers = ("power_dbm", "noise_dbm_per_hz", "path_loss_db")
    check.scalar(**radio._asdict())
    check.positive(**{name: value for name, value in radio._asdict().items() if name not in powers})
    return Radio(*(jnp.asarray(value, jnp.float32) for value in radio))
