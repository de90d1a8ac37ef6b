"""Prefix tree and block hashes: prefixes are the same only if every input is, and live as long as they are held."""

import msgspec
import numpy as np
import pytest
from simulated_device import simulated_manifest

from castiron.runtime import block_hash
from castiron.runtime.block_hash import block_key, encode_domains, engine_domains, root_key
from castiron.runtime.manifest import Manifest, Member, Profile
from castiron.runtime.prefix_tree import PrefixNode, PrefixTree


def content(*token_ids: int) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def chain(tree: PrefixTree, domains: block_hash.Domains, token_ids: bytes) -> PrefixNode | None:
    """Put a sequence's full blocks in the tree; the last one, held."""
    encoded = encode_domains(domains)
    keys = [root_key(encoded)]
    tree.extend_keys(keys, token_ids)
    node = tree.root(keys[0], encoded)
    size = 4 * tree.block_size
    for place, key in enumerate(keys[1:]):
        assert node is not None
        node = tree.extend(node, key, token_ids[place * size : (place + 1) * size])
    return node


def known(tree: PrefixTree, domains: block_hash.Domains, token_ids: bytes) -> int:
    """How many leading blocks of a sequence the tree has."""
    encoded = encode_domains(domains)
    keys = [root_key(encoded)]
    tree.extend_keys(keys, token_ids)
    return len(tree.walk(keys, encoded, token_ids))


def test_a_key_covers_the_tokens_and_all_before_them() -> None:
    root = root_key(encode_domains(()))
    one, other = block_key(root, content(1, 2)), block_key(root, content(2, 1))
    assert len({root, one, other, block_key(one, content(3, 4)), block_key(other, content(3, 4))}) == 5
    assert len(one) == block_hash.KEY_BYTES >= 16
    assert block_key(root, content(1, 2)) == one


@pytest.mark.parametrize(
    "other",
    [
        (),
        (("cache_salt", b"Y"),),
        (("adapter", b"X"),),  # the same text in another domain
        (("cache_salt", b"X"), ("adapter", b"X")),
        (("adapter", b"X"), ("cache_salt", b"X")),
        (("cache_saltX", b""),),  # the same bytes, split otherwise
        (("cache_sal", b"tX"),),
        (("", b"cache_saltX"),),
        (("cache_salt", b""), ("", b"X")),
    ],
)
def test_no_other_domains_share_a_key_or_a_prefix_with_these(other: block_hash.Domains) -> None:
    mine = (("cache_salt", b"X"),)
    assert root_key(encode_domains(mine)) != root_key(encode_domains(other))
    tree = PrefixTree(2)
    chain(tree, mine, content(1, 2, 3, 4))
    assert known(tree, mine, content(1, 2, 3, 4)) == 2
    assert known(tree, other, content(1, 2, 3, 4)) == 0


def manifest() -> Manifest:
    members = (
        Member("plan.bin", 0, 10, "1" * 64),
        Member("weights/model-00001.safetensors", 0, 10, "2" * 64),
        Member("report.json", 0, 10, "3" * 64),
    )
    return msgspec.structs.replace(simulated_manifest(Profile(4, 64, 32)), members=members)


def changed_member(index: int) -> Manifest:
    members = list(manifest().members)
    members[index] = msgspec.structs.replace(members[index], sha256="f" * 64)
    return msgspec.structs.replace(manifest(), members=tuple(members))


def test_engines_of_other_weights_plans_models_or_cache_dtypes_share_no_key() -> None:
    base = manifest()
    engines = [
        base,
        changed_member(0),
        changed_member(1),
        msgspec.structs.replace(base, model=msgspec.structs.replace(base.model, config={"eps": 1})),
        msgspec.structs.replace(
            base, quantization=msgspec.structs.replace(base.quantization, cache_dtype="f16")
        ),
    ]
    keys = [root_key(encode_domains(engine_domains(engine))) for engine in engines]
    assert len(set(keys)) == len(keys)
    report_changed = changed_member(2)  # what doesn't reach the cache doesn't matter
    assert root_key(encode_domains(engine_domains(report_changed))) == keys[0]


def test_a_sequences_leading_full_blocks_are_found_up_to_the_first_difference() -> None:
    tree = PrefixTree(2)
    chain(tree, (), content(1, 2, 3, 4, 5, 6))
    assert known(tree, (), content(1, 2, 3, 4, 5, 6, 7, 8)) == 3
    assert known(tree, (), content(1, 2, 3, 4, 5)) == 2  # a partial block isn't one
    assert known(tree, (), content(1, 2, 3, 9, 5, 6)) == 1
    assert known(tree, (), content(3, 4, 5, 6)) == 0


def test_a_prefix_lives_while_it_or_one_that_continues_it_is_held() -> None:
    tree = PrefixTree(1)
    short, long = chain(tree, (), content(1, 2)), chain(tree, (), content(1, 2, 3, 4))
    assert short is not None and long is not None
    assert len(tree) == 5  # a root and four blocks
    tree.release(short)
    assert known(tree, (), content(1, 2)) == 2
    tree.check_integrity([long])
    tree.release(long)
    assert len(tree) == 0


def test_integrity_check_sees_a_holder_not_counted_and_one_too_many() -> None:
    tree = PrefixTree(1)
    node = chain(tree, (), content(1, 2))
    assert node is not None
    tree.check_integrity([node])
    with pytest.raises(AssertionError):
        tree.check_integrity([])
    with pytest.raises(AssertionError):
        tree.check_integrity([node, node])


def test_sequences_whose_keys_collide_are_never_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash of a few bits, whatever is found is exactly what was put in."""
    monkeypatch.setattr(block_hash, "block_key", lambda parent, tokens: bytes([sum(tokens) % 2]))
    tree = PrefixTree(1)
    first = chain(tree, (), content(1, 4))
    assert first is not None
    assert known(tree, (), content(1, 4)) == 2
    assert known(tree, (), content(3, 4)) == 0 and known(tree, (), content(1, 6)) == 1
    assert chain(tree, (), content(3)) is None, "its key is taken: it isn't cached"
    tree.release(first)
    assert len(tree) == 0
    other = chain(tree, (), content(3, 4))  # the same keys again
    assert other is not None
    assert known(tree, (), content(3, 4)) == 2 and known(tree, (), content(1, 4)) == 0


def test_a_child_left_behind_is_not_found_behind_another_parent_of_the_same_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child's own tokens and key are equal; only its parent differs."""
    monkeypatch.setattr(block_hash, "block_key", lambda parent, tokens: b"%d" % (len(parent) + 1))
    tree = PrefixTree(1)
    encoded = encode_domains(())
    assert chain(tree, (), content(1, 7)) is not None
    keys = [root_key(encoded)]
    tree.extend_keys(keys, content(2, 7))
    assert len(tree.walk(keys, encoded, content(2, 7))) == 0
    assert len(tree.walk(keys, encoded, content(1, 7))) == 2
