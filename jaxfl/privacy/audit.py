"""An empirical lower bound on epsilon, from canaries in one training run.

Every canary is a sample whose gradient is `strength` in one coordinate of its own and zero elsewhere (a Dirac canary),
or zero everywhere when a fair coin leaves it out. Either way it stays among its node's samples, so including it or not
is the zero-out relation with J fixed, and an algorithm that is (epsilon, delta)-DP under that relation lets nobody
guess the coins better than randomized response would. Whoever sees all messages guesses the surest tenth of them; the
number of right guesses gives the bound.

The attack is the matched filter of a constant gradient: the sum over rounds of what is released in the canary's
coordinate. A table of stored gradients (PrivSGP-VR) then shows the canary in every round, sampled or not.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, arXiv:2305.08846, Theorem 5.2, as
computed by jax-privacy (`pip install 'jaxfl[audit]'`).

Does not claim: that the true epsilon is near the bound. Less than the claim is no proof of the claim, and the bound
tells a mistake only where it is large (noise a few times too small, a missing clip). Rounds count the same, whatever
their noise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import Algorithm, ArgumentError, Array, FederatedData, PyTree, Task, check
from jaxfl.core.tasks import check_sample_losses

_GUESSED_SHARE = 0.1  # fixed before the scores are seen, so that no correction for choosing it is due


class Canaries(NamedTuple):
    """Where each of m canaries is, and whether it is in."""

    nodes: np.ndarray  # (m,), int64, its node
    coordinates: np.ndarray  # (m,), int64, its coordinate of that node's "canary" parameters
    included: np.ndarray  # (m,), bool, fair coins


class AuditResult(NamedTuple):
    """What an audit found."""

    dp_epsilon_lower_bound: float  # 0 when nothing could be told
    dp_delta: float
    significance: float  # probability that the bound exceeds the true epsilon, at most
    neighboring_relation: str  # "zero_out"
    num_guesses: int
    num_correct: int
    guess_threshold: float  # distance of a score from the median from which on it is guessed
    scores: np.ndarray  # (m,), float64, high for a canary that seems included


def with_canaries(
    task: Task, data: FederatedData, num_canaries: int, *, strength: float, seed: int, shared_coordinates: bool = True
) -> tuple[Task, FederatedData, Canaries]:
    """A task and its data with canaries among the samples, spread evenly over the nodes.

    Real samples keep their loss.

    Args:
        task: what is learned.
        data: the nodes' samples.
        num_canaries: m, at least 1.
        strength: norm of an included canary's gradient; take at least the clip norm, to reach it.
        seed: of the coins.
        shared_coordinates: canary j of every node has coordinate j, which keeps gradients n times smaller: canaries are
            told apart by the node that releases them. False gives each canary of the network a coordinate of its own,
            for what releases sums over nodes.

    Returns:
        (task, data, canaries): parameters {"model": the task's, "canary": (c,) float32}, c = ceil(m / n) or m; inputs
        (N + m, F + 2) float32: the flattened sample, the coordinate + 1 (0 for a real sample), and 1 for an included
        canary. The wrapped task has no factored layers, so clipping runs one sample at a time.

    Raises:
        ArgumentError: no canaries, a strength that is not positive, or a task with `train_loss`.

    Guarantees:
        - an included canary's gradient is strength in its own coordinate, an excluded one's is zero.
        - real samples keep loss, metrics and gradient.
        - the nodes' sizes do not depend on the coins.

    Example:
        >>> import jax
        >>> task = Task(lambda key: jnp.zeros(2), lambda w, x, y: x @ w, lambda w, x, y: {"loss": x @ w})
        >>> data = FederatedData(jnp.ones((4, 2)), jnp.zeros(4, jnp.int32), jnp.arange(4).reshape(2, 2), jnp.full(2, 2))
        >>> _, more, canaries = with_canaries(task, data, 6, strength=3.0, seed=0)
        >>> more.sizes.tolist(), canaries.nodes.tolist(), canaries.coordinates.tolist()
        ([5, 5], [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2])
    """
    check.at_least(1, num_canaries=num_canaries)
    check.positive(strength=strength)
    check_sample_losses(task)
    numbers = np.arange(num_canaries)
    places, nodes = np.divmod(numbers, data.num_nodes)
    coordinates = places if shared_coordinates else numbers
    included = np.random.default_rng(seed).integers(0, 2, num_canaries).astype(bool)
    sample_shape, dtype = data.inputs.shape[1:], data.inputs.dtype

    def split(inputs):
        sample = inputs[:, :-2].reshape(-1, *sample_shape).astype(dtype)
        return sample, inputs[:, -2].astype(jnp.int32), inputs[:, -1]

    def init(key):
        return {"model": task.init(key), "canary": jnp.zeros(int(coordinates[-1]) + 1, jnp.float32)}

    def canary_loss(params, marks, switches):
        return jnp.float32(strength) * switches * params["canary"][jnp.maximum(marks - 1, 0)]

    def loss(params, inputs, labels):
        samples, marks, switches = split(inputs)
        own = task.loss(params["model"], samples, labels)
        return jnp.where(marks > 0, canary_loss(params, marks, switches), own)

    def metrics(params, inputs, labels):
        samples, marks, switches = split(inputs)
        own = {name: jnp.where(marks > 0, 0, m) for name, m in task.metrics(params["model"], samples, labels).items()}
        return {**own, "loss": own["loss"] + canary_loss(params, marks, switches)}

    flat = np.asarray(data.inputs).reshape(len(data.inputs), -1).astype(np.float32)
    inputs = np.zeros((len(flat) + num_canaries, flat.shape[1] + 2), np.float32)
    inputs[: len(flat), :-2] = flat
    inputs[len(flat) :, -2] = coordinates + 1
    inputs[len(flat) :, -1] = included
    labels = np.asarray(data.labels)
    labels = np.concatenate([labels, np.zeros((num_canaries, *labels.shape[1:]), labels.dtype)])

    real, sizes = np.asarray(data.indices), np.asarray(data.sizes)
    new_sizes = sizes + np.bincount(nodes, minlength=data.num_nodes).astype(sizes.dtype)
    indices = np.zeros((data.num_nodes, new_sizes.max()), real.dtype)
    for node, size in enumerate(sizes):
        indices[node, :size] = real[node, :size]
    indices[nodes, sizes[nodes] + places] = len(flat) + numbers
    with_them = FederatedData(*(jnp.asarray(part) for part in (inputs, labels, indices, new_sizes)))
    wrapped = Task(init=init, loss=loss, metrics=metrics, node_loop=task.node_loop)
    return wrapped, with_them, Canaries(nodes=nodes, coordinates=coordinates, included=included)


def canary_scores(
    algorithm: Algorithm,
    released: Callable[[Any, Any], PyTree],
    data: FederatedData,
    canaries: Canaries,
    key: Array,
    num_rounds: int,
) -> Array:
    """What is released in each canary's coordinate, summed over rounds; pure, to be jitted.

    Args:
        algorithm: with a task and data made by `with_canaries`.
        released: (state before, state after a round) -> leaves (n, *leaf), each node's noisy gradient of that round as
            an observer of all messages learns it.
        data, canaries: of `with_canaries`.
        key: base key of the run.
        num_rounds: K, static.

    Returns:
        (m,), float32.
    """

    def one_round(carry, _):
        before, total = carry
        after, _ = algorithm.round(key, before, data)
        return (after, total + released(before, after)["canary"]), None

    start = algorithm.init(key, data)
    nothing = jnp.zeros_like(algorithm.node_params(start)["canary"])
    (_, total), _ = jax.lax.scan(one_round, (start, nothing), None, length=num_rounds)
    return total[canaries.nodes, canaries.coordinates]


def epsilon_lower_bound(
    scores: np.ndarray, included: np.ndarray, *, dp_delta: float, significance: float = 0.05
) -> tuple[float, int, int, float]:
    """The largest epsilon that the guesses refute at `dp_delta`.

    Guesses: a score above the median means included, one below it left out; only the tenth of the canaries farthest
    from the median is guessed. The bound of Mahloujifar et al. 2024 (arXiv:2410.22235) for the same guesses is larger,
    but refutes a whole Gaussian trade-off curve: for randomized response it exceeds the true epsilon.

    Args:
        scores: (m,).
        included: (m,), bool.
        dp_delta: in (0, 1).
        significance: in (0, 1), probability that the bound exceeds the true epsilon.

    Returns:
        (bound, number of guesses, number of right guesses, distance from the median from which on a score is guessed);
        the bound is 0 when nothing is refuted.

    Raises:
        ArgumentError: jax-privacy is missing, dp_delta or significance out of range, scores that are not finite.

    Guarantees:
        - exceeds the epsilon of an (epsilon, delta)-DP mechanism with probability at most significance.
    """
    check.open_unit(dp_delta=dp_delta, significance=significance)
    scores = np.asarray(scores, np.float64)
    if not np.isfinite(scores).all():
        found = f"{int((~np.isfinite(scores)).sum())} of {scores.size} are not"
        raise ArgumentError("scores", "must be finite", found, "Take a smaller step size: the run has diverged.")
    auditing = require_jax_privacy()
    distance = scores - np.median(scores)
    sureness, right = np.abs(distance), (distance > 0) == np.asarray(included)
    num_guesses = max(1, int(_GUESSED_SHARE * scores.size))
    threshold = np.sort(sureness)[-num_guesses]
    # The auditor's "in" and "out" are our right and wrong guesses: the theorem asks for no more than their numbers.
    # It refuses an empty list, hence one more canary in each that is never guessed.
    never = np.array([-np.inf])
    auditor = auditing.CanaryScoreAuditor(
        np.concatenate([sureness[right], never]), np.concatenate([sureness[~right], never])
    )
    strategy = auditing.Explicit(threshold)
    bound = auditor.epsilon_one_run(significance, dp_delta, threshold_strategy=strategy)
    guessed = sureness >= threshold
    return float(bound), int(guessed.sum()), int((guessed & right).sum()), float(threshold)


def audit(
    algorithm: Algorithm,
    released: Callable[[Any, Any], PyTree],
    data: FederatedData,
    canaries: Canaries,
    key: Array,
    num_rounds: int,
    dp_delta: float,
    *,
    significance: float = 0.05,
) -> AuditResult:
    """Run the algorithm, attack every canary, and bound epsilon from below.

    Args:
        algorithm, released, data, canaries, key, num_rounds: as for `canary_scores`.
        dp_delta, significance: as for `epsilon_lower_bound`.

    Returns:
        An `AuditResult`, for the run of `num_rounds` rounds as one release under the zero-out relation.

    Raises:
        ArgumentError: as `epsilon_lower_bound`, or fewer than one round.
    """
    check.at_least(1, num_rounds=num_rounds)
    require_jax_privacy()
    sizes = data.sizes  # concrete, so that the algorithm can check them

    @jax.jit
    def run(key, data):
        return canary_scores(algorithm, released, data._replace(sizes=sizes), canaries, key, num_rounds)

    scores = np.asarray(run(key, data), np.float64)
    bound, num_guesses, num_correct, threshold = epsilon_lower_bound(
        scores, canaries.included, dp_delta=dp_delta, significance=significance
    )
    return AuditResult(
        dp_epsilon_lower_bound=bound,
        dp_delta=dp_delta,
        significance=significance,
        neighboring_relation="zero_out",
        num_guesses=num_guesses,
        num_correct=num_correct,
        guess_threshold=threshold,
        scores=scores,
    )


def require_jax_privacy() -> Any:
    """jax-privacy's module of audits, an optional dependency.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module("jax_privacy.auditing")
    except ImportError:
        remedy = "Run pip install 'jaxfl[audit]'."
        raise ArgumentError("audit", "needs jax-privacy", "it is not installed", remedy) from None
