"""What the contents of cached blocks are known by: chained hashes of token ids.

A block's key covers its own token ids and, through its parent's key, all tokens before them, down to a root
that covers whatever else makes two caches differ: model, weights, plan, dtype, a request's salt. Each such
input is a domain: its name and both lengths are hashed with it, so that the same bytes in two domains, or
split otherwise between them, never share a key.
"""

import hashlib

import msgspec

from castiron.runtime.manifest import Manifest

KEY_BYTES = 16

Domains = tuple[tuple[str, bytes], ...]  # (name, value)


def encode_domains(domains: Domains) -> bytes:
    """The domains as bytes from which they could be read back."""
    parts = [part for name, value in domains for part in (name.encode(), value)]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def root_key(encoded_domains: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return hashlib.blake2b(encoded_domains, digest_size=KEY_BYTES, person=b"castiron root").digest()


def block_key(parent_key: bytes, token_ids: bytes) -> bytes:
    """The key of a full block; `token_ids` are its tokens as int32."""
    data = parent_key + token_ids
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=b"castiron block").digest()


def engine_domains(manifest: Manifest) -> Domains:
    """What all blocks of an engine have in common: other weights, plans or cache dtypes never share a key.

    One domain, whose value is the sha256 of these.
    """
    members = sorted(
        (member.name, member.sha256)
        for member in manifest.members
        if member.name.startswith(("weights/", "plan."))
    )
    weights = (manifest.weights_source, members)  # dummy weights have no members
    parts = encode_domains(
        (
            ("model", msgspec.json.encode(manifest.model)),
            ("weights and plan", msgspec.json.encode(weights)),
            ("cache dtype", manifest.quantization.cache_dtype.encode()),
        )
    )
    return (("engine", hashlib.sha256(parts).digest()),)
