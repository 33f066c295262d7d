"""Communication graphs (which node sends to which), and the mixing step x <- P x."""

from typing import TYPE_CHECKING

from jaxfl.on_use import import_on_use

if TYPE_CHECKING:
    from jaxfl.graphs.files import read_graph
    from jaxfl.graphs.graph import Graph
    from jaxfl.graphs.isolated import isolated
    from jaxfl.graphs.mixing import best_structure, messages_received, messages_sent, mix
    from jaxfl.graphs.random_graphs import random_digraph
    from jaxfl.graphs.spectral import is_strongly_connected_over_period, spectral_gap
    from jaxfl.graphs.topologies import (
        TrackingPair,
        complete,
        directed_ring,
        exponential,
        five_agents,
        five_agents_self_loops,
        from_matrix,
        from_networkx,
        permute,
        ring,
        sequence,
        star,
        static_exponential,
    )
    from jaxfl.graphs.validation import (
        require_column_stochastic,
        require_doubly_stochastic,
        require_row_stochastic,
        require_strongly_connected,
        require_undirected,
    )

__all__ = [
    "Graph",
    "TrackingPair",
    "best_structure",
    "complete",
    "directed_ring",
    "exponential",
    "five_agents",
    "five_agents_self_loops",
    "from_matrix",
    "from_networkx",
    "is_strongly_connected_over_period",
    "isolated",
    "messages_received",
    "messages_sent",
    "mix",
    "permute",
    "random_digraph",
    "read_graph",
    "require_column_stochastic",
    "require_doubly_stochastic",
    "require_row_stochastic",
    "require_strongly_connected",
    "require_undirected",
    "ring",
    "sequence",
    "spectral_gap",
    "star",
    "static_exponential",
]

import_on_use(
    __name__,
    {
        "jaxfl.graphs.files": "read_graph",
        "jaxfl.graphs.graph": "Graph",
        "jaxfl.graphs.isolated": "isolated",
        "jaxfl.graphs.mixing": "best_structure messages_received messages_sent mix",
        "jaxfl.graphs.random_graphs": "random_digraph",
        "jaxfl.graphs.spectral": "is_strongly_connected_over_period spectral_gap",
        "jaxfl.graphs.topologies": (
            "TrackingPair complete directed_ring exponential five_agents five_agents_self_loops from_matrix "
            "from_networkx permute ring sequence star static_exponential"
        ),
        "jaxfl.graphs.validation": (
            "require_column_stochastic require_doubly_stochastic require_row_stochastic require_strongly_connected "
            "require_undirected"
        ),
    },
)
