"""The lines of code that docs/methods.md gives for each method are counted here, in the library.

python tests/test_methods_page.py  # prints the rows of the table
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from experiments.methods.choices import METHODS as CHOSEN
from jaxfl import algorithms

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "methods.md").read_text()
COMPARED, COUNTED = PAGE.partition("## Lines of code")[::2]
METHODS = list(  # constructors in the first column of the tables, in their order
    dict.fromkeys(
        name
        for cell in re.findall(r"^\| (`[^|]*) \|", COMPARED.partition("## Beside other")[0], flags=re.M)
        for name in re.findall(r"`(\w+)[`(]", cell)
        if hasattr(algorithms, name)
    )
)
SHARED = ("server_rounds", "gossip_rule")  # modules with the rounds of many methods


def in_code(text, nodes):
    """Number of lines of these parts of a file without docstrings, comments and empty lines."""
    places, rows = set(), text.splitlines()
    for node in nodes:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        places.update(range(first, 1 + (node.end_lineno or 0)))
        for inner in ast.walk(node):
            has_body = isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.Module)
            if has_body and ast.get_docstring(inner) is not None:
                places.difference_update(range(inner.body[0].lineno, 1 + (inner.body[0].end_lineno or 0)))
    return sum(bool(rows[at - 1].strip()) and not rows[at - 1].strip().startswith("#") for at in places)


def lines_of(name):
    """Lines of a constructor and of the functions and classes of its file that it uses."""
    text = Path(inspect.getfile(inspect.unwrap(getattr(algorithms, name)))).read_text()
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used, left = set(), {name}
    while left:
        used |= left
        reached = {node.id for one in left for node in ast.walk(defined[one]) if isinstance(node, ast.Name)}
        left = (reached & defined.keys()) - used
    return in_code(text, [defined[one] for one in used])


def lines_of_file(name):
    text = Path(importlib.import_module(f"jaxfl.algorithms.{name}").__file__ or "").read_text()
    return in_code(text, ast.parse(text).body)


def stated(name):
    """What the page says, [] where it says nothing."""
    return [int(count) for count in re.findall(rf"`{name}(?:\.py)?` \| (\d+) \|", COUNTED)]


def test_the_page_compares_methods():
    assert {"fed_avg", "scaffold", "krum", "exact_diffusion", "choco_sgd"} <= {*METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_the_page_gives_the_lines_of_every_method(name):
    """To a fifth, or three lines, so that small changes need no new page."""
    (count,) = stated(name)
    assert abs(count - lines_of(name)) <= max(3, lines_of(name) // 5)


@pytest.mark.parametrize("name", SHARED)
def test_the_page_gives_the_lines_that_methods_share(name):
    (count,) = stated(name)
    assert abs(count - lines_of_file(name)) <= lines_of_file(name) // 5


def test_every_method_has_a_row_of_the_results_or_says_why_not():
    page = (ROOT / "experiments" / "results" / "methods" / "README.md").read_text()
    cells = dict(re.findall(r"^\| `(\w+)` \| \d+ \| (.*) \|$", COUNTED, flags=re.M))
    assert {*cells} == {*METHODS}
    for name, cell in cells.items():
        own, _, option = cell.partition(";")[0].partition(", `--")
        for row in own.split(", "):
            assert row in CHOSEN, name
            assert re.search(rf"^\| {re.escape(row)} \|", page, flags=re.M), name
        if option:
            value = option.rstrip("`").split()[1]
            assert re.search(rf"^\| .*\b{value}\b.* \|", page, flags=re.M), name


if __name__ == "__main__":
    for name in METHODS:
        print(f"| `{name}` | {lines_of(name)} |")
    for name in SHARED:
        print(f"| `{name}.py` | {lines_of_file(name)} |")
