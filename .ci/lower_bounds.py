"""Prints the lower bounds of pyproject.toml as exact versions for pip, one a line: what tests need at their oldest."""

import re
import tomllib
from pathlib import Path

EXTRAS = ("audit", "cluster", "data", "test")

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
rows = project["dependencies"] + [row for extra in EXTRAS for row in project["optional-dependencies"][extra]]
for row in rows:
    name, extras, bound = re.fullmatch(r"([\w-]+)(\[[\w,]+\])?(>=[\d.]+)?(?:,<\d+)?", row).groups()
    if name == project["name"]:  # its own extra, which is in EXTRAS
        continue
    if extras or not bound:
        raise SystemExit(f"{row}: a lower bound is needed, NAME>=VERSION")
    print(f"{name}=={bound[2:]}")
    if name == "jax":
        print(f"jaxlib=={bound[2:]}")
