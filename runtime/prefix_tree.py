"""Which token prefixes the cache knows: a tree of full blocks, exact whatever their hashes are.

A node stands for one prefix: a block's token ids behind those of its parent. Nodes are found by their chained
hash and then compared by content and parent, and at most one node has a given content. So a node is the same
object if and only if the whole prefix is the same, and two prefixes whose hashes collide are never mixed up:
the later one just isn't cached.

A node lives while something holds it: a child, a block of a cache group, a running row. So a sliding window
can find its blocks by a prefix whose older blocks are gone.
"""

from dataclasses import dataclass

from castiron.runtime import block_hash


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A prefix that ends with a full block; a root stands for no tokens."""

    key: bytes
    parent: "PrefixNode | None"
    content: bytes  # the block's token ids, int32; of a root its encoded domains
    num_holders: int = 0  # children, blocks, rows


class PrefixTree:
    """The known prefixes in blocks of one size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[bytes, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, key: bytes, content: bytes) -> PrefixNode | None:
        """The root of these domains, with one holder more; None if its key is taken by others."""
        node = self._intern(key, None, content)
        if node is not None:
            node.num_holders += 1
        return node

    def extend(self, parent: PrefixNode, key: bytes, content: bytes) -> PrefixNode | None:
        """Move a holder from the parent to the child with this content; None, with the parent's holder gone, if
        the child's key is taken by other content.
        """
        node = self._intern(key, parent, content)
        if node is not None:
            node.num_holders += 1
        self.release(parent)
        return node

    def hold(self, node: PrefixNode) -> None:
        """Add a holder to a known node."""
        node.num_holders += 1

    def release(self, node: PrefixNode) -> None:
        """Take a holder away; whatever nobody holds any more is forgotten."""
        node.num_holders -= 1
        while node.num_holders == 0:
            del self._nodes[node.key]
            if node.parent is None:
                return
            node = node.parent
            node.num_holders -= 1

    def walk(self, keys: list[bytes], root_content: bytes, token_ids: bytes) -> list[PrefixNode]:
        """The nodes of a sequence's leading blocks as far as they are known. keys[0] is the root's."""
        nodes: list[PrefixNode] = []
        node = self._find(keys[0], None, root_content)
        num_bytes = 4 * self.block_size
        for place in range(len(keys) - 1):
            if node is None:
                break
            content = token_ids[place * num_bytes : (place + 1) * num_bytes]
            node = self._find(keys[place + 1], node, content)
            if node is not None:
                nodes.append(node)
        return nodes

    def extend_keys(self, keys: list[bytes], token_ids: bytes) -> None:
        """Hash the full blocks of a sequence that have no key yet."""
        num_bytes = 4 * self.block_size
        for place in range(len(keys) - 1, len(token_ids) // num_bytes):
            content = token_ids[place * num_bytes : (place + 1) * num_bytes]
            keys.append(block_hash.block_key(keys[place], content))

    def check_integrity(self, holders: list[PrefixNode]) -> None:
        """Assert that the nodes are held by their children and by `holders`, and by nothing else; for tests."""
        counts = dict.fromkeys(self._nodes.values(), 0)
        for node in [*holders, *(node.parent for node in self._nodes.values() if node.parent is not None)]:
            counts[node] += 1  # a KeyError is a holder of a forgotten node
        for node, count in counts.items():
            assert node.num_holders == count > 0, f"{node.num_holders} holders counted, {count} there"

    def _find(self, key: bytes, parent: PrefixNode | None, content: bytes) -> PrefixNode | None:
        node = self._nodes.get(key)
        if node is not None and node.parent is parent and node.content == content:
            return node
        return None

    def _intern(self, key: bytes, parent: PrefixNode | None, content: bytes) -> PrefixNode | None:
        """The node of this content, made if there is none; None if another content has its key."""
        if key in self._nodes:
            return self._find(key, parent, content)
        node = self._nodes[key] = PrefixNode(key, parent, content)
        if parent is not None:
            parent.num_holders += 1
        return node
