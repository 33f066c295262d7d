"""`python -m experiments` lists what can be run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

EXPERIMENTS = {
    "privsgp_vr": "PrivSGP-VR and PrivSGP: private push-sum over directed graphs, with and without SAGA",
    "bench": "what the engine's formulations gain, as ratios inside one process (conv, saga, all)",
}


def main() -> None:
    """Print the experiments and how to run them."""
    table = Table(title="python -m experiments.<name> [--help]")
    table.add_column("name")
    table.add_column("what")
    for name, what in EXPERIMENTS.items():
        table.add_row(name, what)
    Console().print(table)


if __name__ == "__main__":
    main()
