"""Programs at many shapes, compiled as users compile them: which instructions a loop becomes depends on both.

`pytest` does not look into this file; the gate names it. Slow are the shapes that it leaves out.
"""

import itertools

import pytest
from helpers import crossed
from processes import wrong_as_users_run
from registry import REGISTRY

NODES, SAMPLES = (2, 3, 50, 257), (2, 1, 3)
ENTRIES, TABLES, SAMPLERS = (1, 2, 3, 4, 5), ("dense", "factored", "per_batch"), ("uniform", "fixed", "poisson")


@pytest.mark.parametrize(("nodes", "samples"), crossed(NODES, SAMPLES))
def test_every_algorithm_computes_what_plain_code_computes(nodes, samples):
    cases = [("row", name, nodes, samples) for name, row in REGISTRY.items() if row.special_case_of is None]
    assert wrong_as_users_run(cases) == {}


@pytest.mark.parametrize("nodes", [50, *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in (2, 32, 257, 1000))])
def test_every_table_of_gradients_computes_what_plain_code_computes(nodes):
    """Among fifty nodes each number of entries, table and sampler; elsewhere all together."""
    cases = list(itertools.product(["stored"], [nodes], ENTRIES, TABLES, SAMPLERS))
    assert wrong_as_users_run(cases[:: 7 if nodes == 50 else 1]) == {}
