"""Run by `tests/graphs/test_sharded_mixing.py` in a process whose CPU has eight devices: prints findings as JSON."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxfl import graphs
from jaxfl.core.devices import NODES, by_node
from jaxfl.core.tree import consensus_distance
from jaxfl.graphs.lossy_mixing import lossy_mix

KEY, NODE_COUNT, WIDTH, DEVICES = jax.random.key(1), 32, 7, 8
SHARE = NODE_COUNT // DEVICES
GRAPHS = {
    "exponential": graphs.exponential(NODE_COUNT),
    "ring": graphs.ring(NODE_COUNT),
    "static_exponential": graphs.static_exponential(NODE_COUNT),
    "complete": graphs.complete(NODE_COUNT),
    "star": graphs.star(NODE_COUNT),
    "random_digraph": graphs.random_digraph(NODE_COUNT, 0.08, key=3),
    # Sparse, and not circulant: pairs of nodes of the same device have changed places.
    "relabeled_ring": graphs.permute(graphs.ring(NODE_COUNT), np.arange(NODE_COUNT) ^ 1),
    "sequence": graphs.sequence(
        [graphs.star(NODE_COUNT), graphs.ring(NODE_COUNT), graphs.random_digraph(NODE_COUNT, 0.1, key=4)]
    ),
}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind, shape=(DEVICES,), names=(NODES,)):
    return jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape))


def tree_of(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (NODE_COUNT, 3, 2), "weight": (NODE_COUNT,)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def arrivals():
    arrived = np.random.default_rng(2).uniform(size=(NODE_COUNT, NODE_COUNT)) < 0.6
    return jnp.asarray(arrived | np.eye(NODE_COUNT, dtype=bool))


def largest_difference(mine, other):
    pairs = zip(*map(jax.tree.leaves, (mine, other)), strict=True)
    return max(float(np.abs(np.float64(a) - np.float64(b)).max()) for a, b in pairs)


def structures(graph):
    return ("auto", "dense", "neighbors") + (("circulant",) if graph.shifts is not None else ())


def all_forms(graph):
    """(tree, arrived, k) -> everything that is mixed over the graph, by name."""

    def mixed(tree, arrived, k):
        actual = {"distance": consensus_distance(tree)}
        for structure in structures(graph):
            actual[structure] = graphs.mix(graph, tree, k, structure)
            for keeper in ("sender", "receiver"):
                lossy = lossy_mix(graph, tree, arrived, k, kept_by=keeper, structure=structure)
                actual[f"{structure} lossy {keeper}"] = lossy
        return actual

    return mixed


def differences():
    """Difference of each graph and kind of mesh from a single device: the largest of all forms and of two rounds."""
    tree, arrived, actual = tree_of(), arrivals(), {}
    for name, graph in GRAPHS.items():
        forms, rounds = all_forms(graph), [jnp.int32(k) for k in (0, graph.period + 1)]
        alone = jax.jit(forms)
        expected = [alone(tree, arrived, k) for k in rounds]
        for kind in KINDS:
            mesh = mesh_of(kind)
            with jax.set_mesh(mesh):
                spread, own = jax.jit(forms), jax.device_put(tree, by_node(mesh))
                results = [spread(own, arrived, k) for k in rounds]
            actual[f"{name} {kind}"] = {
                form: max(largest_difference(a[form], b[form]) for a, b in zip(results, expected, strict=True))
                for form in expected[0]
            }
    return actual


def halves():
    """Loss of 16-bit leaves over devices: difference to sums in float32 that are rounded once."""
    graph, values = GRAPHS["static_exponential"], tree_of()["matrix"].astype(jnp.bfloat16)
    with jax.set_mesh(mesh_of("auto")):
        mixed = {form: jax.jit(lambda x, f=form: graphs.mix(graph, x, 0, f))(values) for form in structures(graph)}
    expected = np.tensordot(graph.mixing_matrix(0), np.float64(values), axes=1)
    return {form: [str(x.dtype), largest_difference(x, jnp.asarray(expected, x.dtype))] for form, x in mixed.items()}


def embedded():
    """In shard_maps over another axis, with a mesh of two points and four shares: differences to a single device."""
    tree, actual = tree_of(), {}
    lanes = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf, leaf + 1]), tree)
    for name in ("exponential", "relabeled_ring", "complete"):
        graph = GRAPHS[name]

        def run(lanes, graph=graph):
            return jax.vmap(lambda tree: (graphs.mix(graph, tree, 1), consensus_distance(tree)))(lanes)

        expected = jax.jit(run)(lanes)
        for kind in KINDS:
            mesh, points = mesh_of(kind, (2, 4), ("points", NODES)), PartitionSpec("points")
            with jax.set_mesh(mesh):
                placed = jax.device_put(lanes, NamedSharding(mesh, PartitionSpec("points", NODES)))
                outer = jax.shard_map(run, in_specs=points, out_specs=points, axis_names={"points"})
                actual[f"{name} {kind}"] = largest_difference(jax.jit(outer)(placed), expected)
    return actual


def traffic(compiled):
    """Collectives of a compiled program by their name -> the bytes that each gives a device, largest first."""
    sizes, actual = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s64": 8, "u64": 8, "f64": 8}, {}
    pattern = r"= \(?(\w+)\[([\d,]*)\][^=]*? (all-gather|collective-permute|reduce-scatter|all-reduce|all-to-all)\("
    for dtype, shape, name in re.findall(pattern, compiled.as_text()):
        count = int(np.prod([int(size) for size in shape.split(",") if size]))
        actual.setdefault(name, []).append(sizes[dtype] * count)
    return {name: sorted(values, reverse=True) for name, values in actual.items()}


def sent():
    """Traffic of a mixing step of float32 values (n, 7)."""
    mesh, actual = mesh_of("auto"), {}
    values = jax.device_put(jnp.ones((NODE_COUNT, WIDTH), jnp.float32), by_node(mesh))
    for name in ("random_digraph", "relabeled_ring", "static_exponential", "complete", "ring"):
        for structure in structures(GRAPHS[name]):
            with jax.set_mesh(mesh):
                step = jax.jit(lambda x, g=GRAPHS[name], s=structure: graphs.mix(g, x, 0, s))
                actual[f"{name} {structure}"] = traffic(step.lower(values).compile())
    return actual


def needed(graph):
    """Bytes that the rows take which devices need of others, those of a step of the device that needs most of it."""
    receives = graph.adjacency(0).reshape(DEVICES, SHARE, DEVICES, SHARE).any(axis=1).sum(axis=2)
    steps = [max(receives[(p + k) % DEVICES, p] for p in range(DEVICES)) for k in range(1, DEVICES)]
    return int(sum(steps)) * WIDTH * 4


def uneven():
    """Thirty nodes on eight devices: every device mixes all of them."""
    graph, values = graphs.exponential(30), jnp.arange(30.0)
    with jax.set_mesh(mesh_of("auto")):
        compiled = jax.jit(lambda x: graphs.mix(graph, x, 0)).lower(values).compile()
        return [largest_difference(compiled(values), graphs.mix(graph, values, 0)), traffic(compiled)]


if __name__ == "__main__":
    actual = {
        "devices": jax.device_count(),
        "differences": differences(),
        "halves": halves(),
        "embedded": embedded(),
        "sent": sent(),
        "needed": {name: needed(graph) for name, graph in GRAPHS.items()},
        "uneven": uneven(),
    }
    print(json.dumps(actual))
