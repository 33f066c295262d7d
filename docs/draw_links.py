"""Draws links.png from the curves that links.md computes.

python docs/draw_links.py
"""

import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent


def main() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "links.md").read_text(), flags=re.S):
        exec(compile(block, "links.md", "exec"), names)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, (distance, mass) in names["curves"].items():
        found = np.asarray(distance)
        axes.loglog(np.arange(1, len(found) + 1), found, label=name)
        means = [found[first - 1 : last].mean() for first, last in ((1, 10), (91, 100), (901, 1000))]
        print(name, *(f"{mean:.3g}" for mean in means), f"{float(mass[99]):.6g}", sep=" | ")
        if not np.isfinite(found).all():
            print("not finite from round", int(np.argmin(np.isfinite(found))) + 1)
    axes.set(xlabel="round", ylabel="distance to the optimum", ylim=(5e-3, 30))
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    figure.savefig(DOCS / "links.png", dpi=110)


if __name__ == "__main__":
    main()
