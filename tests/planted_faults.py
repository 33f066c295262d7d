"""Faults put into real runs of the audit's default case one at a time, and how many of five seeds are refused.

    python tests/planted_faults.py                # all of FAULTS and 100 right runs, ten minutes on a core
    python tests/planted_faults.py clip batch     # faults whose name has one of these words; writes nothing
    python tests/planted_faults.py --page         # writes the table of docs/audit.md from the file

A fault wraps the algorithm that runs: its draws (noise and batches), or its configuration. The claim stays that of a
right run. What follows is what `python -m experiments.audit` does with PrivSGP, at the share of the significance that
each of its two methods has. Results: experiments/results/audit/faults.csv; `tests/privacy/test_planted_faults.py`
compares docs/audit.md with it.
"""

import csv
import functools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.audit.attack import Ready, measured, ready  # noqa: E402
from experiments.audit.methods import METHODS  # noqa: E402
from experiments.audit.options import Configuration  # noqa: E402
from jaxfl import gradients  # noqa: E402
from jaxfl.core import Algorithm  # noqa: E402
from jaxfl.frame import Row, override  # noqa: E402
from jaxfl.gradients.samplers import Batch, draw_batch  # noqa: E402
from jaxfl.privacy.audit import AuditResult  # noqa: E402

FILE, PAGE = ROOT / "experiments/results/audit/faults.csv", ROOT / "docs/audit.md"
SEEDS, RIGHT, AUDITS = range(5), range(100), 2  # the default command audits two methods
BIAS, KERNEL, CANARY = "['dense_1']['bias']", "['dense_1']['kernel']", "['canary']"


class Drawn(NamedTuple):
    """The draws of a round, as a fault sees them."""

    leaves: dict[str, Any]  # name -> noise (n, *leaf)
    round: Any  # (), int32
    of_round: Callable[[Any], dict[str, Any]]  # noise of another round
    batch: Batch
    batch_of: Callable[[Any], Batch]  # batch of another round
    std: float  # of the noise, 0 in rounds without it
    key: Any  # of the run


class Fault(NamedTuple):
    """A mistake of a run, which its claim does not have."""

    noise: Callable[[Drawn], dict[str, Any]] | None = None
    batch: Callable[[Drawn], Batch] | None = None
    options: dict[str, Any] | None = None  # of the command
    learner: dict[str, Any] | None = None  # options of the learner only
    std: float = 1.0  # factor on the noise


def each(change: Callable[[Any, Drawn, str], Any], *, only: str = "") -> Fault:
    """Change every leaf's noise, or that of one leaf."""

    def noise(drawn):
        return {k: change(v, drawn, k) if only in ("", k) else v for k, v in drawn.leaves.items()}

    return Fault(noise)


def model(change: Callable[[Any, Drawn, str], Any]) -> Fault:
    """Change the noise of the model's layers."""
    return each(lambda leaf, drawn, name: leaf if name == CANARY else change(leaf, drawn, name))


def sites(*factors: float) -> Callable[[Any, Drawn, str], Any]:
    """Standard deviations of the nodes, in multiples of the claim."""
    return lambda leaf, drawn, name: leaf * jnp.array(factors).reshape(-1, *[1] * (leaf.ndim - 1))


def flat(change: Callable[[Any, Drawn], Any], **options) -> Fault:
    """Change every leaf's noise as (n, d)."""
    return each(lambda leaf, drawn, name: change(leaf.reshape(len(leaf), -1), drawn).reshape(leaf.shape), **options)


def from_round(number: Callable[[Any], Any], sign: Callable[[Any], Any] = lambda k: 1.0, **options) -> Fault:
    """Take the noise of another round."""
    return each(lambda leaf, drawn, name: sign(drawn.round) * drawn.of_round(number(drawn.round))[name], **options)


def order(d: int, seed: int = 7) -> np.ndarray:
    """The same random order of coordinates in every round."""
    return np.random.default_rng(seed).permutation(d)


def correlated(distance: Callable[[int], int], rho: float, shuffled: bool = False) -> Callable[[Any, Drawn], Any]:
    """Pairs of coordinates at a distance, in the leaf's order or a random one."""

    def change(leaf, drawn):
        d = leaf.shape[1]
        places, apart = order(d) if shuffled else np.arange(d), distance(d)
        first = np.arange(d)
        first = first[(first // apart % 2 == 0) & (first + apart < d)]
        mixed = rho * leaf[:, places[first]] + np.sqrt(1 - rho**2) * leaf[:, places[first + apart]]
        return leaf.at[:, places[first + apart]].set(mixed)

    return change


def two_layers(drawn: Drawn) -> dict[str, Any]:
    leaf, other = drawn.leaves[BIAS], drawn.leaves[KERNEL]
    return {**drawn.leaves, BIAS: other.reshape(len(leaf), -1)[:, 100 : 100 + leaf.shape[1]]}


def node_pairs(leaf: Any, drawn: Drawn, name: str) -> Any:
    return leaf.at[1].set(leaf[0]).at[3].set(-leaf[2])


def uniform(leaf: Any, drawn: Drawn, name: str) -> Any:
    share = jax.scipy.stats.norm.cdf(leaf / jnp.maximum(drawn.std, 1e-30))
    return drawn.std * np.sqrt(12) * (share - 0.5)


def laplace(leaf: Any, drawn: Drawn, name: str) -> Any:
    share = jnp.clip(jax.scipy.stats.norm.cdf(leaf / jnp.maximum(drawn.std, 1e-30)), 1e-7, 1 - 1e-7)
    return -drawn.std / np.sqrt(2) * jnp.sign(share - 0.5) * jnp.log1p(-2 * jnp.abs(share - 0.5))


def rounded(leaf: Any, drawn: Drawn, name: str) -> Any:
    return drawn.std * jnp.round(leaf / jnp.maximum(drawn.std, 1e-30)) / np.sqrt(13 / 12)


def cut(leaf: Any, drawn: Drawn, name: str) -> Any:
    return jnp.clip(leaf, -2 * drawn.std, 2 * drawn.std) / 0.9594  # the deviation of such numbers


def some_without(leaf: Any, drawn: Drawn) -> Any:
    d = leaf.shape[1]
    kept = order(d) >= round(0.05 * d)
    return jnp.where(kept, leaf / np.float32(np.sqrt(kept.mean())), 0)


def chosen(drawn: Drawn, members: Any) -> Batch:
    """A batch of the samples where `members` (n, J) holds."""
    batch, (n, capacity) = drawn.batch, drawn.batch.indices.shape
    entries = jnp.argsort(~members, axis=1, stable=True)[:, :capacity].astype(batch.indices.dtype)
    mask = jnp.arange(capacity)[None, :] < members.sum(axis=1, keepdims=True)
    entries = jnp.pad(entries, ((0, 0), (0, capacity - entries.shape[1])))
    mask = mask & (jnp.arange(capacity) < members.shape[1])
    return Batch(jnp.where(mask, entries, 0), mask, jnp.zeros(n, jnp.int32))


def members(batch: Batch, count: int) -> Any:
    """(n, J), bool."""

    def of_node(indices, mask):
        return jnp.zeros(count, jnp.int32).at[indices].add(mask.astype(jnp.int32)) > 0

    return jax.vmap(of_node)(batch.indices, batch.mask)


SAMPLES, ENTRIES, BATCH = 200, 1200, 1080


def fixed(drawn: Drawn) -> Batch:
    return draw_batch(gradients.fixed(BATCH), drawn.key, drawn.round, jnp.full(len(drawn.batch.mask), ENTRIES))


def schedule(drawn: Drawn) -> Batch:
    """Sample j is left out in every tenth round, from round j on."""
    inside = (jnp.arange(ENTRIES) + drawn.round) % 10 != 0
    return chosen(drawn, jnp.broadcast_to(inside, (len(drawn.batch.mask), ENTRIES)))


def always_canaries(drawn: Drawn) -> Batch:
    return chosen(drawn, members(drawn.batch, ENTRIES) | (jnp.arange(ENTRIES) >= SAMPLES))


def same_at_all(drawn: Drawn) -> Batch:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), drawn.batch)


FAULTS: dict[str, dict[str, Fault]] = {
    "size of the noise": {
        "1.1 times too small": Fault(std=1 / 1.1),
        "1.25 times too small": Fault(std=1 / 1.25),
        "2 times too small": Fault(std=1 / 2),
        "4 times too small": Fault(std=1 / 4),
        "1.25 times too large": Fault(std=1.25),
        "none at all": Fault(std=0.0),
        "none after round 0": each(lambda leaf, drawn, name: jnp.where(drawn.round == 0, leaf, 0)),
        "2 % smaller in every round": each(lambda leaf, drawn, name: leaf * 0.98**drawn.round),
        "none in every fourth round, more in the others": each(
            lambda leaf, drawn, name: jnp.where(drawn.round % 4 != 0, np.float32(np.sqrt(4 / 3)) * leaf, 0)
        ),
    },
    "sites": {
        "one without noise": each(sites(0, 1, 1, 1, 1)),
        "one without noise, one with twice the variance": each(sites(1, 0, 1, 2**0.5, 1)),
        "one with half of the variance, one with 1.5 times": each(sites(1, 0.5**0.5, 1, 1.5**0.5, 1)),
    },
    "layers": {
        "one without noise": each(lambda leaf, drawn, name: 0 * leaf, only=BIAS),
        "one without noise after round 0": each(
            lambda leaf, drawn, name: jnp.where(drawn.round == 0, leaf, 0), only=BIAS
        ),
        "the model without noise after round 0": model(lambda leaf, drawn, name: jnp.where(drawn.round == 0, leaf, 0)),
        "one without noise at one site": each(sites(1, 1, 0, 1, 1), only=BIAS),
        "one with half of the noise": each(lambda leaf, drawn, name: leaf / 2, only=KERNEL),
        "one with the same noise in every round": from_round(lambda k: 0 * k, only=BIAS),
    },
    "repeated noise": {
        "in every round": from_round(lambda k: 0 * k),
        "in each two rounds": from_round(lambda k: k // 2),
        "in each two rounds, with opposite signs": from_round(lambda k: k // 2, lambda k: 1.0 - 2 * (k % 2)),
        "at all nodes": each(lambda leaf, drawn, name: jnp.broadcast_to(leaf[:1], leaf.shape)),
        "at two nodes, and opposite at two others": each(node_pairs),
        "a round later at the next node": each(
            lambda leaf, drawn, name: jnp.stack([drawn.of_round(drawn.round + i)[name][0] for i in range(len(leaf))])
        ),
        "zero as the sum over nodes": each(
            lambda leaf, drawn, name: (leaf - leaf.mean(axis=0)) / np.sqrt(1 - 1 / len(leaf))
        ),
        "one number for all of a layer": flat(lambda leaf, drawn: jnp.broadcast_to(leaf[:, :1], leaf.shape)),
        "second half of every layer as the first": flat(correlated(lambda d: d // 2, 1.0)),
        "half of every layer as the other, in random order": flat(correlated(lambda d: d // 2, 1.0, shuffled=True)),
        "in two layers": Fault(two_layers),
        "adjacent coordinates correlated 0.3": flat(correlated(lambda d: 1, 0.3)),
        "far coordinates correlated 0.3": flat(correlated(lambda d: d // 2, 0.3)),
    },
    "shape of the noise": {
        "coin flips": each(lambda leaf, drawn, name: drawn.std * jnp.sign(leaf)),
        "uniform": each(uniform),
        "Laplace": each(laplace),
        "rounded to whole deviations": each(rounded),
        "cut off at two deviations": each(cut),
        "5 % of coordinates without, the others larger": flat(some_without),
    },
    "clipping": {
        "clip norm 1.1 times too large": Fault(learner={"clip_norm": 1.1}),
        "clip norm 1.25 times too large": Fault(learner={"clip_norm": 1.25}),
        "clip norm 1.5 times too large": Fault(learner={"clip_norm": 1.5}),
        "clip norm 2 times too large": Fault(learner={"clip_norm": 2.0}),
        "no clipping": Fault(options={"no_clipping": True}),
    },
    "rounds and batches": {
        "twice the rounds": Fault(options={"rounds_error": 2.0}),
        "twice the sampling rate": Fault(options={"sampling_error": 2.0}),
        "fixed size where Poisson is claimed": Fault(batch=fixed),
        "the same batch in every round": Fault(batch=lambda drawn: drawn.batch_of(0 * drawn.round)),
        "the same batch at all nodes": Fault(batch=same_at_all),
        "batches on a schedule": Fault(batch=schedule),
        "canaries in every batch": Fault(batch=always_canaries),
    },
}
UNSEEN: dict[str, dict[str, Fault]] = {
    "what is small": {
        "noise 1.005 times too small": Fault(std=1 / 1.005),
        "pairs of coordinates in random order correlated 0.2": flat(correlated(lambda d: d // 2, 0.2, shuffled=True)),
        "a layer of ten with noise 1.1 times too small": each(lambda leaf, drawn, name: leaf / 1.1, only=BIAS),
        "clip norm 1.005 times too large": Fault(learner={"clip_norm": 1.005}),
        "two nodes' noise correlated 0.01": each(
            lambda leaf, drawn, name: leaf.at[1].set(0.01 * leaf[0] + np.sqrt(1 - 0.01**2) * leaf[1])
        ),
        "1 % of a batch kept for the next round": Fault(
            batch=lambda drawn: chosen(
                drawn,
                jnp.where(
                    jnp.arange(ENTRIES) % 100 == 0,
                    members(drawn.batch_of(drawn.round // 2), ENTRIES),
                    members(drawn.batch, ENTRIES),
                ),
            )
        ),
    }
}


def planted(algorithm: Algorithm, fault: Fault, std: float) -> Algorithm:
    """The algorithm with the fault in its draws."""

    def draw(key, state, data):
        def at(number):
            return algorithm.draw(key, state._replace(round_index=jnp.int32(number)), data)

        def named(noise):
            return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(noise)}

        right = algorithm.draw(key, state, data)
        drawn = Drawn(
            leaves=named(right.noise),
            round=state.round_index,
            of_round=lambda number: named(at(number).noise),
            batch=right.gradient,
            batch_of=lambda number: at(number).gradient,
            std=std,
            key=key,
        )
        noise = right.noise
        if fault.noise is not None:
            noise = jax.tree.unflatten(jax.tree.structure(noise), fault.noise(drawn).values())
        return right._replace(noise=noise, gradient=right.gradient if fault.batch is None else fault.batch(drawn))

    return algorithm._replace(
        draw=draw, round=lambda key, state, data: algorithm.update(state, data, draw(key, state, data))
    )


RIGHT_METHOD = METHODS["PrivSGP"]


@functools.cache
def claim(options: tuple[tuple[str, Any], ...]) -> Ready:
    """The claim of a run with these options; it does not depend on the seed."""
    return ready(Row(override(Configuration(), dict(options)), (0,), {}))


def results(fault: Fault, seeds: Sequence[int]) -> list[AuditResult]:
    """What the command measures in a faulty run, one for each seed."""

    lane, options, actual = claim(tuple((fault.options or {}).items())), fault.options or {}, []

    def learner(config, task, numbers, noise_std):
        right = RIGHT_METHOD.learner(config, task, numbers._replace(**fault.learner or {}), fault.std * noise_std)
        return right._replace(algorithm=planted(right.algorithm, fault, fault.std * noise_std))

    METHODS["PrivSGP"] = RIGHT_METHOD._replace(learner=learner)
    for seed in seeds:
        row = lane.row._replace(config=override(Configuration(), {**options, "seed": seed}))
        actual.append(measured(lane._replace(row=row), AUDITS).result)
    METHODS["PrivSGP"] = RIGHT_METHOD
    return actual


def row(group: str, name: str, fault: Fault, seeds: Sequence[int]) -> dict[str, Any]:
    """One line of the file."""
    actual = results(fault, seeds)
    refusing = Counter(
        check
        for one in actual
        for check in [
            *(check.name.partition(" (")[0] for check in one.checks if check.refuted),
            *["guesses"] * (one.dp_epsilon_lower_bound > 1),
        ]
    )
    refused = sum(one.dp_epsilon_lower_bound > 1 or any(c.refuted for c in one.checks) for one in actual)
    checks = "; ".join(f"{check} {number}" for check, number in refusing.most_common())
    return {"group": group, "fault": name, "refused": refused, "seeds": len(seeds), "checks": checks}


def table(rows: Sequence[dict[str, str]]) -> str:
    """The table of docs/audit.md."""
    lines = ["| fault | refused | by |", "|---|---|---|"]
    for one in rows:
        checks = [name for name in one["checks"].split("; ") if name]
        full = [name.rpartition(" ")[0] for name in checks if name.endswith(f" {one['seeds']}")]
        some = [name.rpartition(" ")[0] for name in checks if not name.endswith(f" {one['seeds']}")]
        by = ", ".join(full[:3]) + (f" and {len(full) - 3} more" if len(full) > 3 else "") if full else ", ".join(some)
        count = f"{one['refused']} of {one['seeds']}"
        lines.append(f"| {one['group']}: {one['fault']} | {count} | {by} |")
    return "\n".join(lines) + "\n"


def read() -> list[dict[str, str]]:
    """The rows of the file."""
    with open(FILE, newline="") as file:
        return list(csv.DictReader(file))


def main(words: Sequence[str]) -> None:
    if list(words) == ["--page"]:
        before, _, rest = PAGE.read_text().partition("| fault | refused | by |\n")
        after = rest[rest.index("\n\n") + 1 :]
        PAGE.write_text(before + table(read()) + after)
        return
    rows = []
    for group, faults in {**FAULTS, **UNSEEN}.items():
        for name, fault in faults.items():
            if not words or any(word in f"{group}: {name}" for word in words):
                rows.append(row(group, name, fault, SEEDS))
                print(rows[-1], flush=True)
    if not words or "right" in words:
        rows.append(row("right", "no fault", Fault(), RIGHT))
        print(rows[-1], flush=True)
    if not words:
        with open(FILE, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    # Runs of one fault differ in their seeds only: the first compiles for all.
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    main(sys.argv[1:])
