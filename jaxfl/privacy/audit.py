"""An empirical lower bound on epsilon, from canaries in one training run.

Every canary is a sample whose gradient is `strength` in one coordinate of its own and zero elsewhere (a Dirac canary),
or zero everywhere when a fair coin leaves it out. Either way it stays among its node's samples, so including it or not
is the zero-out relation with J fixed, and an algorithm that is (epsilon, delta)-DP under that relation lets nobody
guess the coins better than randomized response would. Whoever sees all messages guesses the surest tenth of them; the
number of right guesses gives the bound.

The attack adds up over rounds what is released in the canary's coordinate, which is best against a gradient that stays
the same (a matched filter). A table of stored gradients (PrivSGP-VR) then shows the canary in every round, sampled or
not.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, arXiv:2305.08846, Theorem 5.2, as
computed by jax-privacy (`pip install '.[audit]'` in a clone).

Does not claim: that the true epsilon is near the bound. A bound below the claimed epsilon does not prove the claim, and
the bound shows only large mistakes (noise a few times too small, a missing clip). `jaxfl.privacy.audit_mechanism`
detects smaller ones in the same run. The attack weighs all rounds alike, whatever their noise.

Canaries that are whole clients: `jaxfl.privacy.client_audit`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import Algorithm, ArgumentError, Array, FactoredLayer, Factors, FederatedData, PyTree, Task, check
from jaxfl.core.tasks import check_sample_losses
from jaxfl.core.tree import leaf_names
from jaxfl.privacy.audit_mechanism import Check, Mechanism, check_mechanism, smallest_guessed_error
from jaxfl.privacy.shared_noise import views

_GUESSED_SHARE = 0.1  # fixed before the scores are seen, so that no correction for choosing it is due


class Canaries(NamedTuple):
    """Place and inclusion of each of m canaries."""

    nodes: np.ndarray  # (m,), int64, its node, or 0 where only a server releases
    coordinates: np.ndarray  # (m,), int64, its coordinate of that node's "canary" parameters
    included: np.ndarray  # (m,), bool, fair coins


class Scores(NamedTuple):
    """Messages of a run, as its observer sees them, and what their noise is."""

    releases: Array  # (K, m), float32, what each message releases in each canary's coordinate
    counts: Array  # (K,), int32, releases that each message adds up
    added: Array  # (K, m), float32, the same without noise and with all canaries included
    noise: PyTree  # leaves (K, n, *leaf), float32, noise of each message in the model


class AuditResult(NamedTuple):
    """Findings of an audit."""

    dp_epsilon_lower_bound: float  # 0 where the guesses refute no epsilon
    dp_delta: float
    significance: float  # probability that the bound exceeds the true epsilon, at most
    neighboring_relation: str  # of the claim
    num_guesses: int
    num_correct: int
    guess_threshold: float  # a score at least this far from the median is guessed
    scores: np.ndarray  # (m,), float64, high for a canary that seems included
    smallest_error: float  # noise this many times too small lifts the bound above the claim with probability 0.95
    checks: tuple[Check, ...]  # of the mechanism


def with_canaries(
    task: Task, data: FederatedData, num_canaries: int, *, strength: float, seed: int, shared_coordinates: bool = True
) -> tuple[Task, FederatedData, Canaries]:
    """A task and its data with canaries among the samples, spread evenly over the nodes.

    Real samples keep their loss.

    Args:
        task, data: what is learned, and the nodes' samples.
        num_canaries: m, at least 1.
        strength: norm of an included canary's gradient; at least the clip norm, so that clipping leaves just that norm.
        seed: of the coins.
        shared_coordinates: True gives canary j of every node coordinate j; the node that releases it tells it apart,
            and the canaries have n times fewer parameters. False gives each canary of the network a coordinate of its
            own, for algorithms that release sums over nodes.

    Returns:
        (task, data, canaries): parameters {"model": the task's, "canary": (c,) float32}, c = ceil(m / n) or m; of a
        task with factored layers they are the task's with "canary" beside them, a factored layer of its own, so that
        clipping and tables run as they do without canaries. Inputs (N + m, F + 2) float32: the flattened sample, the
        coordinate + 1 (0 for a real sample), and 1 for an included canary.

    Raises:
        ArgumentError: no canaries, a strength that is not positive, or a task with `train_loss`.

    Guarantees:
        - an included canary's gradient is strength in its own coordinate, an excluded one's is zero.
        - real samples keep loss, metrics and gradient.
        - the nodes' sizes do not depend on the coins.

    Examples:
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

    num_coordinates = int(coordinates[-1]) + 1

    def model_of(params):
        if task.factors is None:
            return params["model"]
        return {name: leaf for name, leaf in params.items() if name != "canary"}

    def init(key):
        own, canary = task.init(key), jnp.zeros(num_coordinates, jnp.float32)
        return {"model": own, "canary": canary} if task.factors is None else {**own, "canary": canary}

    def canary_loss(params, marks, switches):
        return jnp.float32(strength) * switches * params["canary"][jnp.maximum(marks - 1, 0)]

    def loss(params, inputs, labels):
        samples, marks, switches = split(inputs)
        own = task.loss(model_of(params), samples, labels)
        return jnp.where(marks > 0, canary_loss(params, marks, switches), own)

    def metrics(params, inputs, labels):
        samples, marks, switches = split(inputs)
        own = {name: jnp.where(marks > 0, 0, m) for name, m in task.metrics(model_of(params), samples, labels).items()}
        return {**own, "loss": own["loss"] + canary_loss(params, marks, switches)}

    def factors(params, inputs, labels):
        assert task.factors is not None
        samples, marks, switches = split(inputs)
        losses, own = task.factors(model_of(params), samples, labels)
        real = marks == 0
        errors = tuple(jnp.where(real.reshape(-1, *[1] * (e.ndim - 1)), e, 0) for e in own.errors)
        # The layer's input is part of the sample, so that no table rounds it: the coordinate, exact in float32.
        own_input = jnp.maximum(marks - 1, 0).astype(jnp.float32)[:, None]
        own_error = jnp.where(real, 0, jnp.float32(strength) * switches)[:, None]
        losses = jnp.where(real, losses, canary_loss(params, marks, switches))
        return losses, Factors(inputs=(*own.inputs, own_input), errors=(*errors, own_error))

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
    inputs, labels, indices, new_sizes = (jnp.asarray(part) for part in (inputs, labels, indices, new_sizes))
    with_them = FederatedData(inputs, labels, indices, new_sizes, node_names=data.node_names)
    wrapped = Task(init=init, loss=loss, metrics=metrics, node_loop=task.node_loop)
    if task.factors is not None:
        wrapped = wrapped._replace(layers=(*task.layers, _canary_layer(num_coordinates)), factors=factors)
    return wrapped, with_them, Canaries(nodes=nodes, coordinates=coordinates, included=included)


def _canary_layer(num_coordinates: int) -> FactoredLayer:
    """The canaries' parameters: a sample's gradient is its error at its coordinate."""

    def weighted_sum(coordinates, errors, weights):
        at = coordinates[:, 0].astype(jnp.int32)
        return jnp.zeros(num_coordinates, errors.dtype).at[at].add(weights * errors[:, 0])

    return FactoredLayer(
        name="canary",
        input_is_sample=True,
        is_outer_product=True,
        squared_norm=lambda coordinates, errors: errors[:, 0] ** 2,
        absolute_norm=lambda coordinates, errors: jnp.abs(errors[:, 0]),
        weighted_sum=weighted_sum,
        per_sample=lambda coordinates, errors: (
            errors * jax.nn.one_hot(coordinates[:, 0].astype(jnp.int32), num_coordinates, dtype=errors.dtype)
        ),
    )


def canary_scores(
    algorithm: Algorithm,
    silent: Algorithm,
    released: Callable[[Any, Any], PyTree],
    data: FederatedData,
    canaries: Canaries,
    key: Array,
    num_rounds: int,
    num_releases: Callable[[Any, Any], Array] | None = None,
    covariance: np.ndarray | None = None,
) -> Scores:
    """Collect the values released in each canary's coordinate. The function is pure, to be jitted.

    Args:
        algorithm: with a task and data made by `with_canaries`.
        silent: the same algorithm with noise of scale 0. Each of its rounds begins at a state of `algorithm`, with the
            same batch, and with all canaries included.
        released: (state before, after a round) -> leaves (n, *leaf), each node's noisy gradient of that round as an
            observer of all messages learns it.
        data, canaries: of `with_canaries`.
        key, num_rounds: base key of the run; K, static.
        num_releases: (state before, after a round) -> releases that `released` adds up, (), int32; by default 1.
        covariance: as for `audit`. Each canary has a coordinate of its own then.
    """
    observed, whitened = views(covariance)
    where, count = (canaries.nodes, canaries.coordinates), len(canaries.included)
    everyone = data._replace(inputs=data.inputs.at[-count:, -1].set(1))  # canaries are the last samples of the pool

    def one_round(before, _):
        after, _ = algorithm.round(key, before, data)
        seen, plain = released(before, after), released(before, silent.round(key, before, everyone)[0])
        number = jnp.int32(1) if num_releases is None else num_releases(before, after)
        noise = {k: jax.tree.map(jnp.subtract, leaf, plain[k]) for k, leaf in seen.items() if k != "canary"}
        releases, added = (observed(one["canary"])[where] for one in (seen, plain))
        return after, Scores(releases, number, added, jax.tree.map(whitened, noise))

    return jax.lax.scan(one_round, algorithm.init(key, data), None, length=num_rounds)[1]


def epsilon_lower_bound(
    scores: np.ndarray, included: np.ndarray, *, dp_delta: float, significance: float = 0.05
) -> tuple[float, int, int, float]:
    """The largest epsilon that the guesses refute at `dp_delta`.

    Guesses: a score above the median means included, one below it left out; only the tenth of the canaries farthest
    from the median is guessed. The bound of Mahloujifar et al. 2024 (arXiv:2410.22235) for the same guesses is larger,
    but refutes a whole Gaussian trade-off curve: for randomized response it exceeds the true epsilon.

    Args:
        scores, included: (m,), floats and bools.
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
    distance = scores - np.median(scores)
    sureness, right = np.abs(distance), (distance > 0) == np.asarray(included)
    threshold = np.sort(sureness)[-max(1, int(_GUESSED_SHARE * scores.size))]
    guessed = sureness >= threshold
    num_guesses, num_correct = int(guessed.sum()), int((guessed & right).sum())
    bound = _bound(num_correct, num_guesses, scores.size, dp_delta, significance)
    return bound, num_guesses, num_correct, float(threshold)


def audit(
    algorithm: Algorithm,
    silent: Algorithm,
    released: Callable[[Any, Any], PyTree],
    data: FederatedData,
    canaries: Canaries,
    key: Array,
    num_rounds: int,
    dp_delta: float,
    *,
    dp_epsilon: float,
    claimed: Mechanism,
    significance: float = 0.05,
    neighboring_relation: str = "zero_out",
    num_releases: Callable[[Any, Any], Array] | None = None,
    releases_total: bool = False,
    in_sequence: bool = False,
    covariance: np.ndarray | None = None,
) -> AuditResult:
    """Run the algorithm, attack every canary, bound epsilon from below, and check the mechanism.

    Args:
        algorithm, silent, released, data, canaries, key, num_rounds, num_releases: as for `canary_scores`.
        dp_delta: of the claim.
        dp_epsilon: the epsilon that is claimed.
        claimed: the mechanism that its accountant was told.
        significance: in (0, 1), largest probability that the bound or a check refuses a run that is right: half for
            the bound, half for the checks.
        neighboring_relation: of the claim; a canary's coin decides between two such neighbors.
        releases_total: all rows of what is released are one release.
        in_sequence: later releases of a message depend on the noise of earlier ones. The model's noise is then looked
            at in the first message only, which should hold one release.
        covariance: (n, n), over nodes, of noise that pairs of nodes share, of equal effective noise. The audit looks at
            what an outside observer finds of each node. None: noise is a node's own.

    Raises:
        ArgumentError: as `epsilon_lower_bound` and `check_mechanism`, or fewer than one round.
    """
    check.at_least(1, num_rounds=num_rounds)
    require_jax_privacy()
    sizes = data.sizes  # concrete, so that the algorithm can check them

    @jax.jit
    def run(key, data):
        data = data._replace(sizes=sizes)
        return canary_scores(algorithm, silent, released, data, canaries, key, num_rounds, num_releases, covariance)

    scores = jax.tree.map(np.asarray, run(key, data))
    releases = np.asarray(scores.releases, np.float64)
    sums = releases.sum(axis=0)
    bound, num_guesses, num_correct, threshold = epsilon_lower_bound(
        sums, canaries.included, dp_delta=dp_delta, significance=significance / 2
    )
    nodes = np.zeros_like(canaries.nodes) if releases_total else canaries.nodes
    num_nodes, each = nodes.max() + 1, np.bincount(nodes).min()  # as many canaries of every node
    places = np.stack([np.flatnonzero(nodes == node)[:each] for node in range(num_nodes)])
    noise = {"canary": (releases - scores.added * canaries.included)[:, places]}
    for name, leaf in leaf_names(scores.noise).items():
        noise[name] = leaf[: 1 if in_sequence else None, :num_nodes]
    added = np.where(canaries.included & claimed.stored, np.nan, scores.added)[:, places]
    checks = check_mechanism(
        releases,
        canaries.included,
        claimed,
        dp_epsilon=dp_epsilon,
        dp_delta=dp_delta,
        significance=significance / 2,
        counts=scores.counts,
        noise=noise,
        added=added,
    )
    needed = _correct_needed(num_guesses, sums.size, dp_epsilon, dp_delta, significance / 2)
    mu = claimed.signal / (claimed.noise_std * claimed.num_releases**0.5)
    return AuditResult(
        dp_epsilon_lower_bound=bound,
        dp_delta=dp_delta,
        significance=significance,
        neighboring_relation=neighboring_relation,
        num_guesses=num_guesses,
        num_correct=num_correct,
        guess_threshold=threshold,
        scores=sums,
        smallest_error=smallest_guessed_error(mu, needed, num_guesses, _GUESSED_SHARE),
        checks=checks,
    )


def _bound(num_correct: int, num_guesses: int, num_canaries: int, dp_delta: float, significance: float) -> float:
    """Compute the bound of Theorem 5.2 from the numbers of guesses."""
    auditing = require_jax_privacy()
    # The auditor's "in" and "out" are our right and wrong guesses: the theorem asks for no more than their numbers.
    # It refuses an empty list, hence one more canary in each that is never guessed.
    never = num_canaries - num_guesses
    right, wrong = np.append(np.ones(num_correct), -np.inf), np.ones(num_guesses - num_correct)
    auditor = auditing.CanaryScoreAuditor(right, np.append(wrong, np.full(never + 1, -np.inf)))
    return float(auditor.epsilon_one_run(significance, dp_delta, threshold_strategy=auditing.Explicit(1.0)))


def _correct_needed(
    num_guesses: int, num_canaries: int, dp_epsilon: float, dp_delta: float, significance: float
) -> int:
    """The fewest right guesses that refute an epsilon; `num_guesses` + 1 where not even all of them do."""
    low, high = num_guesses // 2, num_guesses + 1
    while high - low > 1:
        middle = (low + high) // 2
        refuted = _bound(middle, num_guesses, num_canaries, dp_delta, significance) > dp_epsilon
        low, high = (low, middle) if refuted else (middle, high)
    return high


def require_jax_privacy() -> Any:
    """jax-privacy's module of audits, an optional dependency.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return importlib.import_module("jax_privacy.auditing")
    except ImportError:
        remedy = "Run pip install jax-privacy."
        raise ArgumentError("audit", "needs jax-privacy", "it is not installed", remedy) from None
