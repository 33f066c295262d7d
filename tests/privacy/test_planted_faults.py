"""Planted faults: what their file holds, that docs/audit.md says so, and two of them put into real runs again."""

import planted_faults
import pytest
from planted_faults import FAULTS, PAGE, SEEDS, UNSEEN, Fault, read, results, row, table

pytest.importorskip("jax_privacy.auditing")
EACH = [(group, name) for group, faults in FAULTS.items() for name in faults]


def test_the_page_has_the_table_of_the_file():
    assert table(read()) in PAGE.read_text()


def test_the_file_has_all_faults_and_most_are_refused():
    rows = {(one["group"], one["fault"]): one for one in read()}
    unseen = [(group, name) for group, faults in UNSEEN.items() for name in faults]
    assert list(rows) == [*EACH, *unseen, ("right", "no fault")]
    assert len(EACH) == 49
    actual = [int(rows[fault]["refused"]) for fault in EACH]
    assert {int(rows[fault]["seeds"]) for fault in EACH} == {len(SEEDS)} == {5}
    assert sum(refused >= 4 for refused in actual) >= 44
    right = rows["right", "no fault"]
    assert int(right["refused"]) <= 1
    assert int(right["seeds"]) == 100


@pytest.mark.statistical
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "name", "check"),
    [
        ("sites", "one without noise, one with twice the variance", "noise of layers"),
        ("layers", "the model without noise after round 0", "noise of layers"),
        ("repeated noise", "in two layers", "repeated noise"),
        ("rounds and batches", "the same batch in every round", "batches"),
        ("clipping", "clip norm 1.1 times too large", "largest visit"),
    ],
)
def test_a_real_run_with_a_fault_is_refused(group, name, check):
    actual = row(group, name, FAULTS[group][name], [0])
    assert (actual["refused"], actual["seeds"]) == (1, 1)
    assert f"{check} 1" in actual["checks"]


@pytest.mark.slow
def test_a_real_run_without_a_fault_passes_and_the_method_is_left_as_it_was():
    (right,) = results(Fault(), [0])
    assert not any(check.refuted for check in right.checks)
    assert planted_faults.METHODS["PrivSGP"] is planted_faults.RIGHT_METHOD
