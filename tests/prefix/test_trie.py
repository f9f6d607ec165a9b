"""The trie by exact matches: tokens, edges and hashes; and against a brute-force longest common
prefix.
"""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.prefix.salts import SALT_BYTES
from mlx_blockpool.prefix.trie import Node, PrefixRef, Trie
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.store.hashing import decode, encode

# Image patches have ids like these.
PATCH = -(2**60) + 12345


def insert(trie: Trie, tokens: list[int]) -> Node:
    """What a prefix cache does: one edge for each block, where it is not known yet.

    Returns the last node.
    """
    node = trie.root
    for start in range(0, len(tokens), BLOCK_TOKENS):
        edge = encode(tokens[start : start + BLOCK_TOKENS])
        node = trie.child(node, edge) or trie.add(node, edge)[0]
    return node


def trie_of(*sequences: list[int]) -> Trie:
    trie = Trie("namespace")
    for sequence in sequences:
        insert(trie, sequence)
    trie.check()
    return trie


def path_tokens(node: Node) -> list[int]:
    return [token for edge in node.path() for token in decode(edge.tokens)]


def matched(match: PrefixRef) -> list[int]:
    """The tokens that the nodes of a match stand for."""
    tail = decode(match.partial.tokens)[: match.partial_tokens] if match.partial else []
    return [*(path_tokens(match.full_nodes[-1]) if match.full_nodes else []), *tail]


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


A = list(range(1000, 1600))


# -- matching --------------------------------------------------------------------------------------


def test_an_empty_trie_matches_nothing() -> None:
    assert trie_of().match(A) == PrefixRef()
    assert list(trie_of()) == []


def test_the_edges_of_a_sequence_are_its_blocks_and_a_partial_tail() -> None:
    trie = trie_of(A)
    assert [(n.start, n.end, n.is_full) for n in trie] == [
        (0, 256, True),
        (256, 512, True),
        (512, 600, False),
    ]
    assert [decode(n.tokens) for n in trie] == [A[:256], A[256:512], A[512:]]


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 300, 511, 512, 513, 599, 600])
def test_a_prompt_matches_to_the_token(length: int) -> None:
    trie = trie_of(A)
    other = [*A[:length], 7, 7, 7]
    match = trie.match(other)
    assert match.tokens == length
    assert len(match.full_nodes) == length // 256
    assert match.partial_tokens == length % 256
    assert matched(match) == A[:length]
    assert trie.match(A[:length]).tokens == length


def test_a_block_that_ends_with_the_match_is_no_partial() -> None:
    match = trie_of(A).match([*A[:256], 7])
    assert (len(match.full_nodes), match.partial, match.partial_tokens) == (1, None, 0)


def test_a_partial_tail_matches_as_far_as_it_goes() -> None:
    trie = trie_of(A[:300])
    match = trie.match(A)
    assert match.tokens == 300
    assert match.partial is not None
    assert decode(match.partial.tokens) == A[256:300]


def test_the_first_token_decides() -> None:
    assert trie_of(A).match([7, *A[1:]]).tokens == 0


def test_matching_changes_nothing() -> None:
    trie = trie_of(A, [*A[:300], 7])
    before = [(n.hash, n.tokens) for n in trie]
    trie.match([*A[:400], 8])
    assert [(n.hash, n.tokens) for n in trie] == before


def test_siblings_may_start_alike() -> None:
    first, second, third = [*A[:200], 5], [*A[:200], 7, 7], [*A[:100], 6]
    trie = trie_of(first, second, third)
    assert len(list(trie)) == 3
    for sequence in (first, second, third):
        match = trie.match([*sequence, 9])
        assert match.tokens == len(sequence)
        assert match.partial is not None
        assert decode(match.partial.tokens) == sequence
    assert trie.match([*A[:200], 6]).tokens == 200
    assert trie.match([*A[:150], 6]).tokens == 150
    assert trie.match([*A[:100], 9]).tokens == 100


# -- what follows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 255, 256, 257, 599])
def test_what_has_followed_a_prompt_is_found(length: int) -> None:
    trie = trie_of(A)
    assert trie.following(A[:length], 10) == A[length : length + 10]
    assert trie.following(A[:length], 10_000) == A[length:]


def test_nothing_follows_a_prompt_that_ends_a_sequence_or_is_not_cached_as_a_whole() -> None:
    trie = trie_of(A)
    assert trie.following(A, 10) == []
    assert trie.following([*A[:300], 7], 10) == []
    assert trie.following([7], 10) == []


def test_the_continuation_that_was_added_last_follows() -> None:
    trie = trie_of([*A[:300], 5, 6], [*A[:300], 3, 4], [*A[:256], 1])
    assert trie.following(A[:300], 10) == [3, 4]
    insert(trie, [*A[:300], 4, 4])
    assert trie.following(A[:300], 10) == [4, 4]
    assert trie.following(A[:256], 100) == [*A[256:300], 4, 4]
    assert trie.following([*A[:300], 5], 10) == [6]


def test_what_follows_is_of_the_same_salt() -> None:
    trie = trie_of(A)
    assert trie.following(A[:100], 10, bytes(32)) == []


def test_a_full_edge_is_chosen_before_a_sibling_that_starts_alike() -> None:
    trie = trie_of([*A[:255], 1, 50], [*A[:255], 2, 60], [*A[:255], 3, 70])
    match = trie.match([*A[:255], 2, 60])
    assert match.tokens == 257
    assert matched(match) == [*A[:255], 2, 60]


def test_children_are_found_among_many() -> None:
    sequences = [[i * 37 % 1009, i, i + 1] for i in range(500)]
    trie = trie_of(*sequences)
    assert [trie.match(s).tokens for s in sequences] == [3] * 500
    assert trie.match([5 * 37, 5, 7]).tokens == 2
    assert trie.match([5000]).tokens == 0


# -- longer and shorter ----------------------------------------------------------------------------


def test_a_longer_edge_absorbs_the_shorter_one() -> None:
    trie = trie_of(A[:100])
    (short,) = trie
    new, gone = trie.add(trie.root, encode(A[:200]))
    assert gone == [short]
    assert list(trie) == [new]
    assert new.end == 200
    assert short.latest is new
    trie.check()


def test_siblings_that_only_start_alike_are_not_absorbed() -> None:
    trie = trie_of([*A[:100], 5], A[:90])
    insert(trie, A[:200])
    assert sorted(len(path_tokens(n)) for n in trie) == [101, 200]
    trie.check()


def test_a_shorter_sequence_adds_nothing() -> None:
    trie = trie_of(A)
    before = list(trie)
    assert insert(trie, A[:300]) is before[1]
    assert list(trie) == before


def test_child_has_all_of_the_tokens() -> None:
    trie = trie_of(A[:200])
    (node,) = trie
    assert trie.child(trie.root, encode(A[:200])) is node
    assert trie.child(trie.root, encode(A[:50])) is node
    assert trie.child(trie.root, encode(A[:201])) is None
    assert trie.child(trie.root, encode([*A[:50], 7])) is None
    assert trie.child(node, encode(A[200:210])) is None


# -- tokens and hashes -----------------------------------------------------------------------------


def test_tokens_may_be_negative_and_of_60_bits() -> None:
    tokens = [1, PATCH, PATCH + 1, -1, 0, 2**60, 5]
    trie = trie_of(tokens)
    assert decode(encode(tokens)) == tokens
    assert trie.match(tokens).tokens == 7
    assert trie.match([1, PATCH, PATCH + 2]).tokens == 2
    assert trie.match([1, PATCH + 2**32]).tokens == 1
    assert trie.match([1, PATCH, PATCH + 1, 2**32 - 1]).tokens == 3


def test_siblings_with_negative_tokens_are_told_apart() -> None:
    sequences = [[3, token, 4] for token in (PATCH, -1, 0, 1, 255, 256, 2**31, 2**60, -(2**31))]
    trie = trie_of(*sequences)
    assert [trie.match([*s[:2], 9]).tokens for s in sequences] == [2] * len(sequences)
    assert trie.match([3, -2]).tokens == 1


def test_a_hash_depends_on_the_whole_prefix() -> None:
    first, second = insert(Trie("n"), A), insert(Trie("n"), [7, *A[1:]])
    assert first.tokens == second.tokens
    assert first.hash != second.hash
    assert first.hash == insert(Trie("n"), list(A)).hash
    assert insert(Trie("n"), A[:599]).hash != first.hash


def test_a_hash_depends_on_the_namespace() -> None:
    hashes = {insert(Trie(namespace), A).hash for namespace in ("", "a", "b")}
    assert len(hashes) == 3
    assert {len(h) for h in hashes} == {32}


def test_the_same_edge_at_another_place_has_another_hash() -> None:
    node = insert(trie_of(), [7] * 768)
    assert len({n.tokens for n in node.path()}) == 1
    assert len({n.hash for n in node.path()}) == 3


# -- removal ---------------------------------------------------------------------------------------


def test_remove_takes_everything_below() -> None:
    trie = trie_of(A, [*A[:300], 7], [*A[:200], 7])
    second = insert(trie, A).path()[1]
    gone = trie.remove(second)
    assert {n.end for n in gone} == {512, 600}
    assert gone[0] is second
    assert trie.match(A).tokens == 300
    assert trie.match([*A[:200], 7]).tokens == 201
    trie.check()


def test_remove_of_the_first_edge_leaves_what_starts_alike() -> None:
    trie = trie_of(A, [*A[:200], 7])
    gone = trie.remove(insert(trie, A).path()[0])
    assert len(gone) == 3
    assert trie.match(A).tokens == 200
    assert len(list(trie)) == 1


def test_what_was_removed_can_be_added_again() -> None:
    trie = trie_of(A)
    last = insert(trie, A)
    expected = last.hash
    trie.remove(last)
    assert trie.match(A).tokens == 512
    assert insert(trie, A).hash == expected
    assert trie.match(A).tokens == 600


def test_the_root_stays() -> None:
    trie = trie_of(A)
    with pytest.raises(AssertionError, match="the root cannot be removed"):
        trie.remove(trie.root)


# -- the invariant ---------------------------------------------------------------------------------


def test_check_finds_what_is_wrong() -> None:
    trie = trie_of([1, 2], [3, 4])
    trie.root.children.reverse()
    with pytest.raises(AssertionError, match="children at token 0 are out of order"):
        trie.check()
    trie = trie_of(A)
    list(trie)[1].hash = b"wrong"
    with pytest.raises(AssertionError, match="hash at 256"):
        trie.check()


# -- against brute force ---------------------------------------------------------------------------

# Sequences made of few tokens and long stretches, so that they share beginnings and end everywhere
# in blocks.
stretches = st.lists(
    st.tuples(st.sampled_from([0, 1, -1, PATCH]), st.sampled_from([1, 2, 100, 255, 256, 257])),
    min_size=1,
    max_size=4,
)
sequences = stretches.map(lambda parts: [token for token, count in parts for _ in range(count)])


@tried(30, 1500)
@given(st.lists(sequences, min_size=1, max_size=8), st.lists(sequences, min_size=1, max_size=4))
def test_match_is_the_longest_common_prefix(
    known: list[list[int]], prompts: list[list[int]]
) -> None:
    trie = trie_of(*known)
    for prompt in [*prompts, *known]:
        expected = max(common(prompt, sequence) for sequence in known)
        match = trie.match(prompt)
        assert match.tokens == expected
        assert matched(match) == prompt[:expected]


@tried(30, 1500)
@given(st.data())
def test_match_is_the_longest_common_prefix_of_what_removal_leaves(data: st.DataObject) -> None:
    trie = trie_of(*data.draw(st.lists(sequences, min_size=1, max_size=6)))
    for _ in range(data.draw(st.integers(1, 3))):
        nodes = list(trie)
        if nodes:
            gone = trie.remove(nodes[data.draw(st.integers(0, len(nodes) - 1))])
            assert not set(map(id, gone)) & set(map(id, trie))
        insert(trie, data.draw(sequences))
        trie.check()
        prompt = data.draw(sequences)
        expected = max((common(prompt, path_tokens(node)) for node in trie), default=0)
        assert trie.match(prompt).tokens == expected


# -- salts -----------------------------------------------------------------------------------------


def salted(trie: Trie, tokens: list[int], salt: bytes) -> Node:
    node = trie.root_of(salt)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        node = trie.add(node, encode(tokens[start : start + BLOCK_TOKENS]))[0]
    return node


def test_prefixes_under_different_salts_share_nothing() -> None:
    trie = trie_of(A)
    mine, other = salted(trie, A, b"1" * 32), salted(trie, A, b"2" * 32)
    trie.check()
    shared = trie.match(A).path
    assert len({node.hash for node in (*shared, *mine.path(), *other.path())}) == 9
    assert list(trie.match(A, b"1" * 32).path) == mine.path()
    assert trie.match(A, b"3" * 32) == PrefixRef(salt=b"3" * 32)
    assert len(list(trie)) == 9


def test_hashes_without_a_salt_are_those_that_they_always_were() -> None:
    node = insert(Trie("namespace"), A[:3])
    assert node.hash.hex() == "bd27651dd1ebe368389597b318fabd2764944355394f2846eaed9535776f5237"


def test_a_salted_root_goes_with_its_last_edge() -> None:
    trie = trie_of(A)
    salted(trie, A, b"1" * 32)
    assert len(trie.roots()) == 2
    trie.remove(trie.match(A, b"1" * 32).full_nodes[0])
    gc.collect()
    assert len(trie.roots()) == 1


def test_a_root_is_found_again_by_what_a_record_says_of_it() -> None:
    trie = Trie("namespace")
    root = trie.root_of(b"1" * 32)
    assert trie.root_named(root.hash, (b"1" * 32).hex()) is root
    assert trie.root_named(trie.root.hash, None) is trie.root
    for parent, salt in (
        (root.hash, None),
        (root.hash, (b"2" * 32).hex()),
        (root.hash, "zz"),
        (root.hash, "00"),
        (b"x" * 32, None),
    ):
        assert trie.root_named(parent, salt) is None


def test_edges_under_a_salt_stay_although_only_the_trie_refers_to_them() -> None:
    """As those of records that are on disk alone."""
    trie, salt = Trie("namespace"), bytes(range(SALT_BYTES))
    trie.add(trie.root_of(salt), encode(list(range(BLOCK_TOKENS))))
    gc.collect()
    (root,) = trie.roots()[1:]
    (child,) = root.children
    assert trie.match(list(range(BLOCK_TOKENS)), salt).tokens == BLOCK_TOKENS
    trie.remove(child)
    del root, child
    gc.collect()
    assert trie.roots() == [trie.root]
