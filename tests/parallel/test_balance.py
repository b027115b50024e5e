# SPDX-License-Identifier: Apache-2.0
"""Spreading the bytes of replicated tensors over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.parallel import BalancedPlan, ParallelLayout, Replicated, balance_by_bytes
from ckptmgr.parallel.redundancy import Groups, groups_of
from tests.parallel.mindspore.layouts import layouts

Shapes = Sequence[tuple[str, tuple[int, ...]]]


def imbalance(plan: BalancedPlan) -> float:
    """Return the largest load over the mean; 1.0 is perfect."""
    return float(plan.loads.max() / plan.loads.mean())


def everybody(ranks: int) -> Groups:
    return (tuple(range(ranks)),)


def llama(layers: int, width: int, hidden: int, vocabulary: int, *, key_width: int) -> Shapes:
    block = [("q", width), ("k", key_width), ("v", key_width), ("o", width)]
    found: list[tuple[str, tuple[int, ...]]] = [
        ("embedding", (vocabulary, width)),
        ("head", (vocabulary, width)),
        ("norm", (width,)),
    ]
    for layer in range(layers):
        found += [(f"{layer}.{name}", (rows, width)) for name, rows in block]
        found += [(f"{layer}.up", (hidden, width)), (f"{layer}.gate", (hidden, width))]
        found += [(f"{layer}.down", (width, hidden)), (f"{layer}.norm", (width,))]
    return found


def replicated(shapes: Shapes, ranks: int, item_bytes: int = 4) -> list[Replicated]:
    groups = everybody(ranks)
    return [Replicated(name=n, shape=s, item_bytes=item_bytes, groups=groups) for n, s in shapes]


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        (replicated(llama(16, 2048, 8192, 128256, key_width=512), 8), 8),
        (replicated(llama(32, 4096, 14336, 128256, key_width=1024), 16, item_bytes=2), 16),
        (replicated(llama(4, 256, 1024, 250000, key_width=256), 8), 8),
        (replicated([("only", (1_000_003, 64))], 8), 8),
    ],
    ids=["llama-1B", "llama-8B-bf16", "big-vocabulary", "one-tensor"],
)
def test_largest_load_is_at_most_two_percent_over_the_mean(
    model: list[Replicated], ranks: int
) -> None:
    plan = balance_by_bytes(model)
    assert plan.ranks == tuple(range(ranks))
    assert imbalance(plan) <= 1.02


def test_ranks_with_bytes_of_their_own_save_less_of_the_shared_ones() -> None:
    own = Replicated(name="expert", shape=(100,), item_bytes=4, groups=((0,),))
    shared = Replicated(name="shared", shape=(300,), item_bytes=4, groups=((0, 1),))
    plan = balance_by_bytes([shared, own])
    assert plan.loads.tolist() == [800, 800]


def saved_rows(plan: BalancedPlan, one: Replicated, group: tuple[int, ...]) -> np.ndarray:
    copies = np.zeros(one.rows, int)
    for rank in group:
        for share in plan.shares(rank):
            if share.name == one.name:
                copies[share.start_row : share.stop_row] += 1
    return copies


@given(
    st.lists(layouts(dimensions=2), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 40),
    st.none() | st.integers(0, 64),
)
def test_every_row_is_saved_as_often_as_asked(
    given_layouts: list[ParallelLayout], keep: int, rows: int, chunk_bytes: int | None
) -> None:
    tensors = [
        Replicated(name=str(number), shape=(rows, 3), item_bytes=2, groups=groups_of(layout))
        for number, layout in enumerate(given_layouts)
    ]
    plan = balance_by_bytes(tensors, keep_redundancy=keep, chunk_bytes=chunk_bytes)
    for one in tensors:
        for group in one.groups:
            assert (saved_rows(plan, one, group) == min(keep, len(group))).all()
    per_rank = [sum(share.size_bytes for share in plan.shares(rank)) for rank in plan.ranks]
    assert per_rank == plan.loads.tolist()


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_the_tensors(random: object) -> None:
    tensors = replicated([(f"t{number}", (number % 7 + 1, 5)) for number in range(20)], 4)
    shuffled = sorted(tensors, key=lambda _: random.random())  # type: ignore[attr-defined]
    one, other = balance_by_bytes(tensors), balance_by_bytes(shuffled)
    assert [one.shares(rank) for rank in range(4)] == [other.shares(rank) for rank in range(4)]


def test_scalar_is_one_row() -> None:
    plan = balance_by_bytes(replicated([("s", ())], 2))
    assert plan.shares(0) == [("s", 0, 1, 4)]


def test_equal_groups_of_different_objects_are_one_layout() -> None:
    tensors = [
        Replicated(name=name, shape=(2,), item_bytes=1, groups=(tuple(range(0, 2)),))
        for name in "ab"
    ]
    assert balance_by_bytes(tensors).loads.tolist() == [2, 2]


def test_nothing_to_save_is_a_plan_without_chunks() -> None:
    plan = balance_by_bytes([])
    assert (plan.chunks, plan.ranks) == ((), ())


@pytest.mark.slow
def test_thousands_of_ranks_and_tensors_are_planned_side_by_side() -> None:
    ranks = 4096
    sharded = groups_of(ParallelLayout(device_matrix=(512, 8), tensor_map=((0,), ())))
    tensors = [
        Replicated(name=f"t{number}", shape=(4096, 64), item_bytes=2, groups=sharded)
        for number in range(400)
    ]
    tensors += replicated([(f"n{number}", (4096,)) for number in range(100)], ranks)
    plan = balance_by_bytes(tensors)
    assert imbalance(plan) <= 1.02


@pytest.mark.parametrize("keep", [1, 2])
def test_many_slices_are_dealt_out_as_few_are(keep: int) -> None:
    shards = groups_of(ParallelLayout(device_matrix=(4, 32), tensor_map=((0,),)))
    tensors = [
        Replicated(name=f"t{number}", shape=(number + 1,), item_bytes=8, groups=shards)
        for number in range(20)
    ]
    plan = balance_by_bytes(tensors, keep_redundancy=keep, chunk_bytes=16)
    assert imbalance(plan) <= 1.02
    for one in tensors:
        assert (saved_rows(plan, one, shards[5]) == keep).all()


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ((), "no rank"),
        (((),), "no rank"),
        (((0, 1), (2,)), "different"),
        (((0, 1), (1, 2)), "twice"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups: Groups, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        balance_by_bytes([Replicated(name="w", shape=(4,), item_bytes=4, groups=groups)])


def test_keeping_no_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_redundancy is 0"):
        balance_by_bytes([], keep_redundancy=0)
