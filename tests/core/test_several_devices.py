"""Nodes shared out over devices: in a process whose CPU has three of them."""

import pytest
from processes import printed


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Output of `several_devices.py`."""
    return printed("several_devices.py", tmp_path_factory.mktemp("runs"), num_devices=3)


@pytest.mark.slow
def test_convolutions_on_a_cpu_of_several_devices_are_shared_out(found):
    assert found["devices"] == 3
    assert (found["automatic"], found["automatic without convolutions"]) == ("devices:map", "vmap")
    assert found["used"] == "devices:map"


@pytest.mark.slow
def test_strategies_agree_to_rounding_where_devices_cannot_share_nodes_evenly(found):
    assert len(found["differences"]) == 10
    assert max(found["differences"].values()) < 1e-6


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_with_the_same_lines(found):
    assert found["resumed alike"]
