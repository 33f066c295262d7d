"""Mixing where nodes lie over devices: in a process whose CPU has eight of them."""

import numpy as np
import pytest
from processes import printed

from jaxfl import graphs
from jaxfl.graphs.neighbor_lists import needed_rows

ROW = 7 * 4  # bytes


@pytest.fixture(scope="module")
def actual():
    """Output of `mixing_over_devices.py`."""
    return printed("mixing_over_devices.py", num_devices=8)


@pytest.mark.slow
def test_nodes_over_devices_are_mixed_to_the_same_numbers(actual):
    """All structures, with and without losses, and the consensus distance, on Auto and Explicit meshes."""
    assert actual["devices"] == 8
    assert len(actual["differences"]) == 16
    for name, forms in actual["differences"].items():
        assert len(forms) in (10, 13), name
        assert max(forms.values()) < 2e-6, (name, forms)  # of distances near 7


@pytest.mark.slow
def test_leaves_of_16_bits_are_summed_in_float32_and_rounded_once(actual):
    assert len(actual["halves"]) == 4
    for dtype, difference in actual["halves"].values():
        assert dtype == "bfloat16"
        assert difference < 0.005  # one rounding of numbers below 1.3; a sum in 16 bits is off by 0.01


@pytest.mark.slow
def test_works_on_auto_and_on_explicit_meshes_and_inside_a_shard_map_over_another_axis(actual):
    assert len(actual["embedded"]) == 6
    assert max(actual["embedded"].values()) < 2e-6


@pytest.mark.slow
def test_rows_that_stay_on_their_device_are_not_sent_and_no_row_twice_to_the_same_device(actual):
    assert actual["sent"]["ring circulant"] == {"collective-permute": [ROW, ROW]}
    # Of 4 rows on each device: shifts by 1, 2 and 4 take all to the next, 8 and 16 to those 2 and 4 places on.
    assert actual["sent"]["static_exponential circulant"] == {"collective-permute": [4 * ROW] * 3}


@pytest.mark.slow
def test_only_needed_rows_are_sent(actual):
    for name in ("random_digraph", "relabeled_ring"):
        sent = actual["sent"][f"{name} neighbors"]
        assert set(sent) == {"collective-permute"}
        assert sum(sent["collective-permute"]) == actual["needed"][name]
    assert actual["sent"]["relabeled_ring auto"] == {"collective-permute": [ROW, ROW]}


@pytest.mark.slow
def test_products_of_a_dense_graph_are_reduced_and_scattered(actual):
    for name in ("complete auto", "random_digraph auto", "ring dense"):
        assert actual["sent"][name] == {"reduce-scatter": [4 * ROW]}


@pytest.mark.slow
def test_nodes_that_devices_cannot_share_evenly_are_mixed_on_each(actual):
    assert actual["uneven"] == [0.0, {}]


@pytest.mark.parametrize("num_shares", [2, 3, 6])
def test_every_row_travels_to_a_device_at_most_once_a_round(num_shares):
    """And receivers find their in-neighbors' rows, whichever device has them."""
    graph = graphs.sequence([graphs.star(12), graphs.random_digraph(12, 0.3, key=2), graphs.ring(12)])
    plan, share = needed_rows(graph, num_shares), 12 // num_shares
    nodes = np.arange(12).reshape(num_shares, share)
    for k in range(graph.period):
        for device in range(num_shares):
            received = [nodes[device]]
            for step, rows in zip(plan.steps, plan.sent, strict=True):
                sender = (device - step) % num_shares
                distinct = rows[k, sender][np.r_[True, rows[k, sender][1:] != 0]]  # but for the row that fills up
                assert len(set(distinct.tolist())) == len(distinct)
                received.append(nodes[sender, rows[k, sender]])
            held = np.concatenate(received)
            heard = held[plan.senders[k][:, nodes[device]]]
            for place, node in enumerate(nodes[device]):
                others = set(np.flatnonzero(graph.adjacency(k)[node]).tolist())
                assert {int(node), *heard[:, place].tolist()} == others
    assert plan.rows_sent() == sum(rows.shape[2] for rows in plan.sent) > 0
