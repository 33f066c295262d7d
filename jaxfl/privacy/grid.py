"""Facts of noise on a grid (`jaxfl.privacy.grid_noise`) that accounting needs, without JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxfl.core.check import ArgumentError, at_least
from jaxfl.privacy.statements import FLOAT_NOISE, FLOAT_SUM

UNCOUNTED = "the formula knows no grid: the cost of rounding to the grid is not counted"

FEWEST_BITS, MOST_BITS = 8, 16  # of a step; one more bit doubles the table and the 11 s that making it takes


class Grid(NamedTuple):
    """Grid of the releases of one node.

    Attributes:
        bits: the step is noise_std 2^-bits.
        num_params: d, coordinates of a release.
        num_nodes: n, whose pairs share integers; 1 where a node's are its own.
    """

    bits: int
    num_params: int
    num_nodes: int = 1

    @property
    def rounding(self) -> float:
        """Most that rounding adds to the L2 change of a release, in units of noise_std: 2^-bits sqrt(d).

        The step of shared noise is smaller: its own noise, which is below the effective one, counts there.
        """
        return 2.0**-self.bits * math.sqrt(self.num_params)

    @property
    def distance(self) -> float:
        """Bound on the total variation distance of a release's noise from what `grid_gaussian` says it is.

        Of shared noise the integers of all nodes and pairs count, of any number of bits.
        """
        if self.num_nodes == 1:
            return self.num_params * 2.0 ** (self.bits - 124)
        draws = self.num_nodes * (self.num_nodes + 1) // 2
        return draws * self.num_params * 2.0 ** (MOST_BITS - 124)


def check_bits(**arguments: int) -> None:
    """Each value is a static integer of 8 ... 16."""
    at_least(FEWEST_BITS, **arguments)
    for name, bits in arguments.items():
        if bits > MOST_BITS:
            requirement = f"must be at most {MOST_BITS}"
            raise ArgumentError(name, requirement, f"got {bits}", "Pass fewer: the table doubles with every bit.")


def check_grid(grid: Grid | None) -> None:
    """Refuse a grid out of range; None passes."""
    if grid is not None:
        at_least(1, num_params=grid.num_params)
        check_bits(bits=grid.bits)


def check_rounding(epsilon_of: Callable[[float], float], target_epsilon: float, sensitivity: float) -> None:
    """Refuse a target epsilon that no noise meets: the grid's step grows with the noise, so rounding always costs some.

    Args:
        epsilon_of: noise_std -> epsilon.
        target_epsilon: the epsilon to be met.
        sensitivity: L2 change of a release before rounding.
    """
    least = epsilon_of(1e6 * sensitivity)
    if least > target_epsilon:
        found = f"rounding to the grid alone costs {least:.3g}"
        remedy = "Pass more bits of the grid, or take noise in float32."
        raise ArgumentError("target_epsilon", "must be met by some noise", found, remedy)


def assumption(grid: Grid | None) -> str:
    """Describe in the words of a statement how the noise of releases is made. Without a grid it is made in float32."""
    if grid is None:
        return FLOAT_NOISE
    whose = "the" if grid.num_nodes == 1 else "the own"
    return (
        "batches and noise from the threefry pseudo-random generator count as ideal; releases are integers times"
        f" {whose} noise over {2**grid.bits}, what rounding adds to a sample's influence is counted, and a thousandth"
        f" of delta is kept for the noise, which is exact to {grid.distance:.1g} a release; {FLOAT_SUM}"
    )
