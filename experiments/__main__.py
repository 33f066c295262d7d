"""`python -m experiments` lists what can be run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

EXPERIMENTS = {
    "privsgp_vr": "PrivSGP-VR against PrivSGP, DP2-SGD and A(DP)2SGD: private learning with its epsilon",
    "dp_gradient_tracking": "DP gradient tracking over two directed graphs, and the methods it is compared with",
    "embracing_fl": "EmbracingFL: weak clients train the output side of a model; against width reduction and FedAvg",
    "partial.similarity": "how alike the layers of clients' models are (SVCCA), where none or a part is averaged",
    "spanning_tree": "gradient tracking against plain distributed SGD where graphs have only spanning trees",
    "audit": "an empirical lower bound on epsilon by canaries, held against what is claimed",
    "bench": "what the engine's formulations gain, as ratios inside one process (one suite, or all)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the experiments and how to run them; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments not in (["--help"], ["-h"]):
        name = arguments[0]
        remedy = f"Write python -m experiments.{name}." if name in EXPERIMENTS else "Leave it out to see the list."
        print(f"error: arguments: python -m experiments takes none; got {name!r}. {remedy}", file=sys.stderr)
        return 2
    table = Table(title="python -m experiments.<name> [--help]")
    table.add_column("name")
    table.add_column("what")
    for name, what in EXPERIMENTS.items():
        table.add_row(name, what)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
