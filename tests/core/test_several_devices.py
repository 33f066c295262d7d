"""Nodes shared out over devices: in a process whose CPU has three of them."""

import pytest
from processes import printed


@pytest.fixture(scope="module")
def actual(tmp_path_factory):
    """Output of `several_devices.py`."""
    return printed("several_devices.py", tmp_path_factory.mktemp("runs"), num_devices=3)


@pytest.mark.slow
def test_convolutions_on_a_cpu_of_several_devices_are_shared_out(actual):
    assert actual["devices"] == 3
    assert (actual["automatic"], actual["automatic without convolutions"]) == ("devices:map", "vmap")
    assert actual["used"] == "devices:map"


@pytest.mark.slow
def test_strategies_agree_to_rounding_where_devices_cannot_share_nodes_evenly(actual):
    assert len(actual["differences"]) == 10
    assert max(actual["differences"].values()) < 1e-6


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_with_the_same_lines(actual):
    assert actual["resumed alike"]
