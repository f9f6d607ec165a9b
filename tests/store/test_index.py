"""Index: sizes, the order of use, and who has to go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_blockpool.store.index import Index


def make(**sizes: int) -> Index:
    index = Index()
    for name, size in sizes.items():
        index.add(name, size)
    return index


def test_the_sum_follows_what_is_added_and_removed() -> None:
    index = make(a=10, b=20)
    index.add("a", 15)
    assert (index.nbytes, len(index), index.size("a")) == (35, 2, 15)
    assert [index.remove("b"), index.remove("b"), index.remove("c")] == [20, 0, 0]
    assert (index.nbytes, list(index), "b" in index) == (15, ["a"], False)


def test_victims_are_those_used_longest_ago_and_no_more_than_needed() -> None:
    index = make(a=10, b=20, c=30)
    assert index.victims(10) == ["a"]
    assert index.victims(11) == ["a", "b"]
    assert index.victims(0) == index.victims(-5) == []
    assert list(index) == ["a", "b", "c"]


def test_nobody_goes_where_all_would_not_be_enough() -> None:
    index = make(a=10, b=20, c=30)
    assert index.victims(61) == []
    assert index.victims(41, {"b"}) == []
    assert index.victims(40, {"b"}) == ["a", "c"]


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


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.sampled_from(["add", "remove", "back", "touch"]))))
def test_the_sum_is_the_sum(steps: list[tuple[str, int, str]]) -> None:
    index = Index()
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
