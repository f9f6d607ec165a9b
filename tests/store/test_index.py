"""Index: sizes, the order of use, and who has to go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_blockpool.store.index import Index


def make(limit: int = 100, **sizes: int) -> Index:
    index = Index(limit)
    for name, size in sizes.items():
        index.add(name, size)
    return index


def test_the_sum_follows_what_is_added_and_removed() -> None:
    index = make(a=10, b=20)
    index.add("a", 15)
    assert (index.nbytes, len(index), index.size("a")) == (35, 2, 15)
    assert [index.remove("b"), index.remove("b"), index.remove("c")] == [20, 0, 0]
    assert (index.nbytes, list(index), "b" in index) == (15, ["a"], False)


def test_who_was_used_longest_ago_makes_room_and_no_more_than_needed() -> None:
    index = make(60, a=10, b=20, c=30)
    assert index.room_for(10) == ["a"]
    assert index.room_for(11) == ["a", "b"]
    assert index.room_for(0) == index.room_for(-5) == []
    assert list(index) == ["a", "b", "c"]


def test_nobody_goes_where_all_would_not_be_enough() -> None:
    index = make(60, a=10, b=20, c=30)
    assert index.room_for(61) is None
    assert index.room_for(41, "b".__eq__) is None
    assert index.room_for(40, "b".__eq__) == ["a", "c"]


def test_over_the_limit_goes_what_may_even_if_it_is_not_enough() -> None:
    index = make(25, a=10, b=20, c=30)
    assert index.surplus() == ["a", "b", "c"]
    index.pinned = {"b"}
    assert index.surplus() == ["a", "c"]
    index.limit = 60
    assert index.surplus() == []


def test_pinned_files_make_no_room() -> None:
    index = make(60, a=10, b=20, c=30)
    index.pinned = {"a", "unknown"}
    assert index.pinned_bytes == 10
    assert index.room_for(10) == ["b"]
    assert index.room_for(10, "b".__eq__) == ["c"]
    assert index.room_for(51) is None


def test_what_is_kept_for_a_time_is_as_good_as_pinned_until_it_is_not() -> None:
    index = make(60, a=10, b=20, c=30)
    index.pinned, index.kept = {"a"}, {"a", "b"}
    assert (index.pinned_bytes, index.room_for(10)) == (30, ["c"])
    index.kept = frozenset()
    assert (index.pinned_bytes, index.room_for(10)) == (10, ["b"])


def test_the_files_of_one_model_are_counted_among_all() -> None:
    index = Index(100, "m/")
    for name, size in {"other/a": 30, "m/a": 10, "m/b": 20, "other/b": 10}.items():
        index.add(name, size)
    assert (index.nbytes, index.own_bytes) == (70, 30)
    assert index.room_for(31) == ["other/a"], "the least recently used, of whatever model"
    index.remove("m/b")
    assert (index.own_bytes, index.report()["model_bytes"]) == (10, 10)


def test_what_was_touched_is_told_once_in_the_order_of_use() -> None:
    index = make(a=1, b=1, c=1, d=1)
    assert not index.has_touched
    index.touch(["a", "b", "unknown"])
    index.touch(["d", "c"])
    index.touch(["a"])
    index.remove("d")
    assert index.has_touched
    assert index.take_touched() == ["b", "c", "a"]
    assert index.take_touched() == []


def test_the_beginning_of_a_path_that_was_used_outlives_its_end() -> None:
    index = make(root=1, middle=1, leaf=1, other=1)
    index.touch(["root", "middle", "leaf", "unknown"])
    assert list(index) == ["other", "leaf", "middle", "root"]


def test_added_again_is_used_last() -> None:
    index = make(a=1, b=1)
    index.add("a", 1)
    assert list(index) == ["b", "a"]


def test_what_could_not_be_removed_is_the_first_to_go_again() -> None:
    index = make(a=1, b=2)
    index.put_back("c", 4)
    assert (list(index), index.nbytes) == (["c", "a", "b"], 7)
    index.put_back("b", 9)
    assert (list(index), index.nbytes) == (["c", "a", "b"], 7), "it was written again meanwhile"


def test_arranged_files_take_each_others_places() -> None:
    index = make(a=1, x=2, b=3, y=4, c=5)
    index.arrange(["a", "c", "unknown", "b"])
    assert list(index) == ["b", "x", "c", "y", "a"]
    assert (index.nbytes, index.size("b"), index.size("c")) == (15, 3, 5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.integers(0, 9),
            st.sampled_from(["add", "remove", "back", "touch"]),
        )
    )
)
def test_the_sum_is_the_sum(steps: list[tuple[str, int, str]]) -> None:
    index = Index(100)
    for name, size, what in steps:
        if what == "add":
            index.add(name, size)
        elif what == "remove":
            index.remove(name)
        elif what == "back":
            index.put_back(name, size)
        else:
            index.touch([name, "a"])
        assert index.nbytes == sum(index.size(n) for n in index)
        assert len(index) == len(list(index))
