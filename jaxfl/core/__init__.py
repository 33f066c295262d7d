"""Building blocks that all other packages use: tasks, data, algorithms, keys, trees, checks."""

from typing import TYPE_CHECKING

from jaxfl.on_use import import_on_use

if TYPE_CHECKING:
    from jaxfl.core.algorithm import Algorithm, algorithm
    from jaxfl.core.check import ArgumentError
    from jaxfl.core.info import Info
    from jaxfl.core.keys import Key, Purpose, RunKey, leaf_key, node_keys, purpose_key, run_key
    from jaxfl.core.node_loop import over_nodes, update_over_nodes
    from jaxfl.core.tasks import accuracy, cross_entropy, from_flax, from_functions, scale_images
    from jaxfl.core.threefry import one_kernel
    from jaxfl.core.types import Array, FactoredLayer, Factors, FederatedData, Part, PyTree, Task, Variables

__all__ = [
    "Algorithm",
    "ArgumentError",
    "Array",
    "FactoredLayer",
    "Factors",
    "FederatedData",
    "Info",
    "Key",
    "Part",
    "Purpose",
    "PyTree",
    "RunKey",
    "Task",
    "Variables",
    "accuracy",
    "algorithm",
    "cross_entropy",
    "from_flax",
    "from_functions",
    "leaf_key",
    "node_keys",
    "one_kernel",
    "over_nodes",
    "purpose_key",
    "run_key",
    "scale_images",
    "update_over_nodes",
]

import_on_use(
    __name__,
    {
        "jaxfl.core.algorithm": "Algorithm algorithm",
        "jaxfl.core.check": "ArgumentError",
        "jaxfl.core.info": "Info",
        "jaxfl.core.keys": "Key Purpose RunKey leaf_key node_keys purpose_key run_key",
        "jaxfl.core.node_loop": "over_nodes update_over_nodes",
        "jaxfl.core.tasks": "accuracy cross_entropy from_flax from_functions scale_images",
        "jaxfl.core.threefry": "one_kernel",
        "jaxfl.core.types": "Array FactoredLayer Factors FederatedData Part PyTree Task Variables",
    },
)
