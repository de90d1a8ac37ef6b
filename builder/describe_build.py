"""--dry-run: the plan in words, on standard output."""

from castiron.builder.memory_needs import MemoryNeeds
from castiron.builder.plan.planner import PlannedEngine
from castiron.builder.targets import Target
from castiron.runtime.manifest import RUN, Profile

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def describe_plan_text(
    name: str,
    target: Target,
    compute: str,
    profile: Profile,
    planned: PlannedEngine,
    needs: MemoryNeeds,
    schemes: dict[str, dict[str, int]],
) -> str:
    """What an engine would hold and need."""
    header = planned.header
    status = "" if target.status == RUN else f" ({target.status})"
    lines = [
        f"model      {name}",
        f"target     {target.name}{status}, compute {compute}, cache {header.cache_tensors[0].dtype}",
        f"serves     {profile.max_seqs} sequences of up to {profile.max_seq_len} tokens, "
        f"{profile.max_batched_tokens} tokens a step",
        f"memory     {size_text(needs.minimum)} for one sequence of {profile.max_seq_len} tokens: weights "
        f"{size_text(needs.weights)}, arena {size_text(needs.arena)}, other {size_text(needs.other)}, cache "
        f"{size_text(needs.sequence_cache)} ({size_text(needs.block)} a block of "
        f"{header.cache_groups[0].block_size} tokens)",
        "weights    "
        + ", ".join(
            f"{scheme}: {sizes['parameters']} parameters, {size_text(sizes['bytes'])}"
            for scheme, sizes in schemes.items()
        ),
        "plans",
    ]
    for plan in header.plans:
        bucket = plan.bucket
        lines.append(
            f"  {plan.name:<24}{plan.records_count:>6} records, {planned.barriers[plan.name]} barriers, "
            f"up to {bucket.max_tokens} tokens, {bucket.max_seqs} sequences, {bucket.max_logits} logits, "
            f"{bucket.max_query_len} tokens a query"
        )
    lines.append("kernels (launches over all plans)")
    lines += [f"  {kernel:<24}{use.launches:>6}" for kernel, use in planned.kernels.items()]
    return "\n".join(lines)


def size_text(num_bytes: int) -> str:
    """Bytes in the largest unit that fits, "12.3 MiB"."""
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
