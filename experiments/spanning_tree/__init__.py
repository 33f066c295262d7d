"""Gradient tracking against plain distributed SGD where the graphs have only spanning trees: who finds the optimum.

    python -m experiments.spanning_tree         # some seconds; writes runs/spanning_tree/spanning_tree.png

Five agents hold strongly convex quadratics f_i(x) = a_i |x - c_i|^2; the optimum of their sum is known. Gradient
tracking sends states over R and trackers over C, the pair `five_agents`, of which neither is strongly connected. Plain
distributed SGD, x_i <- x_i + alpha sum_j R_ij (x_j - x_i) - gamma grad f_i(x_i), on the same R is drawn to the optimum
of only those agents that reach all others, with constant steps or with steps that fall as 1 / sqrt(k + 1). There is no
noise.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import jaxfl
from jaxfl.analysis.pictures import Mark, Picture, Plot, draw_picture
from jaxfl.analysis.plots import save_figure
from jaxfl.core import check
from jaxfl.frame import Experiment, Request, unsaved
from jaxfl.graphs import TrackingPair, five_agents
from jaxfl.privacy.tracking import TrackingSchedule
from jaxfl.training.run_directory import make_writable, slug

MIXING, STEP_SIZE, NUM_PARAMS = 0.3, 0.05, 3


class Quadratics(NamedTuple):
    """f_i(x) = curvature_i |x - center_i|^2."""

    centers: np.ndarray  # (n, d), float32
    curvatures: np.ndarray  # (n,), float32

    @property
    def optimum(self) -> np.ndarray:
        """Minimizer of the sum of all functions, (d,)."""
        return self.curvatures @ self.centers / self.curvatures.sum()


def quadratics(num_nodes: int, seed: int = 0) -> Quadratics:
    """One for each agent, centers about 1 apart and curvatures from 0.5 to 1.5."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(num_nodes, NUM_PARAMS)).astype(np.float32)
    return Quadratics(centers, rng.uniform(0.5, 1.5, size=num_nodes).astype(np.float32))


def tracking_errors(problem: Quadratics, pair: TrackingPair, num_rounds: int) -> np.ndarray:
    """(num_rounds,): mean over agents of |x_i - optimum|^2 after each round of gradient tracking without noise."""
    silent = np.zeros(num_rounds + 1)
    schedule = TrackingSchedule(MIXING, MIXING, STEP_SIZE, 1, silent, silent)
    task = jaxfl.from_functions(
        lambda key: jnp.zeros(NUM_PARAMS), lambda x, center, a: a * jnp.sum((x[None, :] - center) ** 2, axis=1)
    )
    nodes = len(problem.centers)
    data = jaxfl.federate(problem.centers, problem.curvatures, [[node] for node in range(nodes)])
    learner = jaxfl.gradient_tracking(task, **pair._asdict(), schedule=schedule, clip_norm=None)
    key = jax.random.key(0)

    def step(state, _):
        state, _ = learner.round(key, state, data)
        return state, _error(state.params, problem)

    run = jax.jit(lambda state: jax.lax.scan(step, state, length=num_rounds)[1])
    return np.asarray(run(learner.init(key, data)))


def plain_errors(problem: Quadratics, weights: np.ndarray, num_rounds: int, *, falling: bool) -> np.ndarray:
    """The same errors for distributed SGD with exact gradients on the graph of states."""
    pull = jnp.asarray(weights, jnp.float32)
    in_weights = pull.sum(axis=1, keepdims=True)

    def step(x, k):
        gamma = STEP_SIZE / jnp.sqrt(k + 1.0) if falling else STEP_SIZE
        gradient = 2 * problem.curvatures[:, None] * (x - problem.centers)
        x = x + MIXING * (pull @ x - in_weights * x) - gamma * gradient
        return x, _error(x, problem)

    start = jnp.zeros_like(problem.centers)
    return np.asarray(jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(num_rounds, dtype=jnp.float32))[1])(start))


def _error(x: jax.Array, problem: Quadratics) -> jax.Array:
    """Mean over agents of the squared distance to the optimum."""
    return jnp.mean(jnp.sum((x - problem.optimum[None, :]) ** 2, axis=1))


@dataclasses.dataclass(frozen=True)
class Run:
    """Number of rounds, and folder of the picture."""

    num_rounds: int = 1500
    """Iterations."""
    out: str = unsaved("runs/spanning_tree")
    """Folder for spanning_tree.png."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One picture."""

    run: Run = Run()


def run(request: Request) -> int:
    """Run all three methods, print their errors and draw them, with one picture for each case."""
    for row in request.rows.values():
        check.at_least(1, num_rounds=row.config.run.num_rounds)
    folder = Path(request.config.run.out).expanduser()
    make_writable(folder)
    for name, row in request.rows.items():
        errors = compare(row.config.run.num_rounds)
        picture = folder / (f"spanning_tree-{slug(name)}.png" if len(request.rows) > 1 else "spanning_tree.png")
        draw(errors, picture)
        for method, values in errors.items():
            text = f"{method}: squared distance to the optimum {values[0]:.3g} at first, {values[-1]:.3g} at the end"
            Console(markup=False).print(text, soft_wrap=True)
        Console(markup=False).print(f"Picture: {picture}", soft_wrap=True)
    return 0


def compare(rounds: int) -> dict[str, np.ndarray]:
    """Method -> (rounds,), mean over agents of |x_i - optimum|^2 after each round."""
    pair, problem = five_agents(), quadratics(5)
    errors = {"gradient tracking": tracking_errors(problem, pair, rounds)}
    for name, falling in (("constant", False), ("falling", True)):
        plain = plain_errors(problem, pair.state_weights, rounds, falling=falling)
        errors[f"plain distributed SGD, {name} step"] = plain
    return errors


def draw(errors: dict[str, np.ndarray], path: Path) -> None:
    """Draw one line for each method, error against iterations."""
    title = "Five agents, directed graphs with spanning trees only, quadratics, no noise"
    marks = [Mark(name, range(1, len(values) + 1), values.tolist()) for name, values in errors.items()]
    plot = Plot("mean over agents of |x_i - x*|²", "iteration", marks, log="y")
    save_figure(draw_picture(Picture(path.stem, title, [plot])), path)


EXPERIMENT = Experiment(
    name="spanning_tree",
    description="Gradient tracking against plain distributed SGD where graphs have only spanning trees.",
    base=Configuration(),
    labels={"num_rounds": "{} rounds"},
    run=run,
)
