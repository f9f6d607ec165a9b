"""What a decode step launches on a GPU, counted in its graph."""

from __future__ import annotations

import mlx.core as mx

from benchmarks.launches import launches, per_layer


def test_views_launch_nothing_and_a_concatenation_copies_each_input() -> None:
    array = mx.ones((4, 6))
    mx.eval(array)
    view = array.T.reshape(6, 4)[None, 1:3]
    assert launches([view]).total() == 0
    assert launches([mx.concatenate([array, array, array]) + 1]) == {"Concatenate": 3, "Add": 1}


def test_a_layer_on_the_kernel_launches_at_most_two_operations_more_than_stock() -> None:
    counts = {name: found.total() for name, found in per_layer().items()}
    assert counts["stock"] == 17
    assert counts["kernel"] <= counts["stock"] + 2
    assert counts["kernel, one prefix"] <= counts["stock"] + 2
    # Each sequence is read by a separate attention.
    assert counts["ragged"] <= counts["stock"] + 2 * 8
