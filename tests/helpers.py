"""Helpers for tests of several folders: random arrays, trees as rows of numbers and compared, refusals, parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxfl.core import ArgumentError
from jaxfl.privacy.composition import Curve


def normals(rng: np.random.Generator) -> Callable[..., jax.Array]:
    """shape -> standard normal numbers, float32."""
    return lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)


def rows_of(tree: Any) -> np.ndarray:
    """All numbers of a tree whose leaves have one more axis in front, (b, d), float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def flat(tree: Any) -> np.ndarray:
    """All numbers of a tree, (d,), float64."""
    return rows_of(jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree))[0]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Trees of one structure whose numbers differ by at most the tolerance, absolute plus relative."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


def refused(call: Callable[[], Any], argument: str, *words: str) -> str:
    """The message of the ArgumentError that `call` raises: one line that names the argument and says each word."""
    with pytest.raises(ArgumentError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.argument == argument
    assert message.startswith(argument + ": ")
    assert "\n" not in message
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return message


def curve_delta(curve: Curve, dp_epsilon: float) -> float:
    """Delta of a curve at one epsilon >= 0: between points of its grid it is linear in exp(epsilon)."""
    index = dp_epsilon / curve.step
    left = min(int(index), len(curve.deltas) - 1)
    right = min(left + 1, len(curve.deltas) - 1)
    fraction = min(1.0, math.expm1((index - left) * curve.step) / math.expm1(curve.step))
    return float(curve.deltas[left] + fraction * (curve.deltas[right] - curve.deltas[left]))


def refusals(cases: Iterable[tuple[Callable[[], Any], str]]) -> Callable[..., None]:
    """A test that every one of these calls is refused by the name of the argument beside it."""

    @pytest.mark.parametrize(("call", "argument"), cases)
    def test(call, argument):
        refused(call, argument)

    return test


def equations(program: Any) -> Iterator[Any]:
    """All equations of a traced program, of what it calls and of what rules of its calls make."""
    for equation in program.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations(getattr(value, "jaxpr", value))


def leave_untrained(patch: pytest.MonkeyPatch) -> None:
    """A command begins its run and is interrupted before the first round: exit code 130."""

    def interrupt(*_, stop, **__):
        with stop.heeded():  # the run has begun
            raise KeyboardInterrupt

    patch.setattr("jaxfl.frame.run.train", interrupt)


def leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Pictures are empty files from now on: drawing them takes a quarter of a small run."""
    patch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """All combinations as parameters. The quick ones hold every value once, the others are slow."""
    values: list[Sequence[Any]] = [tuple(axis) for axis in axes]
    quick = {tuple(place % len(axis) for axis in values) for place in range(max(map(len, values)))}
    combinations = itertools.product(*(range(len(axis)) for axis in values))
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in quick else pytest.mark.slow,
        )
        for places in combinations
    ]
