"""How many cache blocks an engine gets: chosen once at load, never grown."""

from castiron.runtime.cache_groups import blocks_of_sequence
from castiron.runtime.engine_options import ServingLimits
from castiron.runtime.errors import EngineFormatError, EngineTargetError, InputError
from castiron.runtime.memory import block_bytes
from castiron.runtime.plan_format import PlanHeader

FREE_MEMORY_SHARE = 0.5  # of what is free after the weights; blocks that were never used cost nothing
GPU_FREE_MEMORY_SHARE = 0.9  # a GPU serves one engine as a rule, and its memory is taken at load
_MIB = 1 << 20


def choose_num_blocks(
    header: PlanHeader,
    limits: ServingLimits,
    kv_memory_bytes: int | None,
    free_bytes: int | None,
    free_share: float = FREE_MEMORY_SHARE,
) -> dict[str, int]:
    """Cache group -> blocks.

    `kv_memory_bytes` None takes what `limits` can use, at most `free_share` of `free_bytes` (bytes free
    once the weights are loaded; None: unknown). Groups share the memory in proportion to what the limits can
    use. Raises InputError if not even one block of each group fits, EngineTargetError if more than
    `free_bytes` is asked for.
    """
    group_bytes = {group.name: block_bytes(header, group.name) for group in header.cache_groups}
    if not group_bytes or min(group_bytes.values()) < 1:
        raise EngineFormatError("the plan has a cache group without cache tensors: rebuild the engine")
    usable = {
        group.name: limits.max_seqs * blocks_of_sequence(group, limits.max_seq_len, limits.max_batched_tokens)
        for group in header.cache_groups
    }
    usable_bytes = sum(usable[name] * group_bytes[name] for name in usable)
    if kv_memory_bytes is None:
        budget = usable_bytes
        if free_bytes is not None:
            budget = min(budget, max(0, int(free_bytes * free_share)))
    else:
        budget = kv_memory_bytes
        if free_bytes is not None and budget > free_bytes:
            raise EngineTargetError(
                f"`kv_memory_bytes` asks for {budget // _MIB} MiB, {max(0, free_bytes) // _MIB} MiB are free "
                f"after the weights: lower it"
            )
    num_blocks = {name: usable[name] * budget // usable_bytes for name in usable}
    if min(num_blocks.values()) < 1:
        least = max(-(-usable_bytes // usable[name]) for name in usable)
        raise InputError(
            f"the KV cache may take {budget} bytes, one block needs {least}: raise `kv_memory_bytes` or "
            f"free memory"
        )
    return num_blocks
