"""inspect-engine's texts for people, from the objects of engine_summary.py and diff_engines.py."""

from typing import Any

from castiron.runtime.diff_engines import Difference
from castiron.runtime.manifest import RUN
from castiron.runtime.printable import one_line

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Model, target, memory, plans, members and provenance, a few lines each."""
    manifest = summary["manifest"]
    model, target, profile = manifest["model"], manifest["target"], manifest["profile"]
    quantization, provenance = manifest["quantization"], manifest["provenance"]
    version = f"format {manifest['format_major']}.{manifest['format_minor']}"
    lines = [
        f"{summary['path']}  {size_text(summary['file_bytes'])}, {version}, "
        f"step ABI {manifest['step_abi_version']}",
        f"model         {model['name']} ({model['family']}), {model['num_parameters'] / 1e6:,.1f} M "
        f"parameters, vocabulary {model['vocab_size']:,}, EOS {_list(model['eos_token_ids'])}",
        f"target        {target['kind']} {target['level']}{_status(target)}, "
        f"kernel ABI {target['kernel_abi_hash'][:12]}",
        f"profile       {profile['max_seqs']} sequences of up to {profile['max_seq_len']:,} tokens, "
        f"{profile['max_batched_tokens']:,} tokens a step",
        f"quantization  {quantization['mode']}, compute {quantization['compute']}, "
        f"cache {quantization['cache_dtype']}; "
        + _list(f"{name} {size_text(size)}" for name, size in quantization["schemes"].items()),
        f"row-stable    {'yes' if manifest['row_stable'] else 'no'}",
        "memory        "
        + _list(f"{name} {size_text(size)}" for name, size in summary["memory"].items() if size),
    ]
    for group in summary["cache_groups"]:
        tensors = [tensor for tensor in summary["cache_tensors"] if tensor["group"] == group["name"]]
        block_bytes = sum(tensor["block_bytes"] for tensor in tensors)
        per_token = (
            f", {size_text(block_bytes // group['block_size'])} a token" if group["kind"] == "paged" else ""
        )
        lines.append(
            f"cache {group['name']:8}{group['kind']}, blocks of {group['block_size']} tokens{per_token}"
        )
    lines.append("plans")
    for plan in summary["plans"]:
        bucket = plan["bucket"]
        lines.append(
            f"  {plan['name']:24} {plan['records']:5} records, {len(plan['kernels']):2} kernels, "
            f"{plan['barriers']:4} barriers, up to {bucket['max_tokens']} tokens, "
            f"{bucket['max_seqs']} sequences"
        )
    lines.append("members")
    for member in manifest["members"]:
        size = size_text(member["size"])
        lines.append(
            f"  {member['name']:40} {size:>10}  at {member['offset']:<12} sha256 {member['sha256'][:16]}"
        )
    sources = _list(f"{name} {sha256[:12]}" for name, sha256 in provenance["source_files"].items())
    tools = _list(f"{name} {version}" for name, version in provenance["tool_versions"].items())
    lines.append(f"built by      castiron {provenance['castiron_version']} ({tools})")
    lines.append(f"built from    {provenance['source_format']}: {sources}")
    passes = _pass_matches(summary["report"])
    if passes:
        lines.append("passes        " + _list(f"{name} {matches}" for name, matches in passes.items()))
    return [one_line(line) for line in lines]


def tactic_lines(choices: list[dict[str, Any]]) -> list[str]:
    """Kernels by how often the plans launch them, each with the candidates that weren't taken."""
    lines = ["launches  kernel (launches over all plans)"]
    for choice in choices:
        op = f" for {choice['op']}" if choice["op"] else ""
        lines.append(f"{choice['launches']:8}  {choice['kernel']}{op}")
        lines += [f"            not {name}: {reason}" for name, reason in choice["refused"].items()]
    return [one_line(line) for line in lines]


def tactic_key_lines(tactics: dict[str, Any]) -> list[str]:
    """Each launch key with the kernel taken, its time and the runners-up. The report may hold anything."""
    entries = tactics.get("keys")
    if not isinstance(entries, list) or not entries:
        return []
    counts = [tactics.get(name, 0) for name in ("measured", "by_cost_model", "stale")]
    lines = [
        f"tactics: {counts[0]} keys measured, {counts[1]} by cost model ({counts[2]} of them with stale times)"
    ]
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("key"), dict):
            continue
        key, origin = entry["key"], entry.get("origin")
        sizes = key.get("sizes")
        named = sizes.items() if isinstance(sizes, dict) else ()
        text = " ".join(f"{name}={value}" for name, value in named)
        lines.append(f"{entry.get('launches', 0)!s:>8}  {key.get('op')} {key.get('operands')} {text}")
        kind = "measured" if origin == "measured" else "estimated"
        why = {"stale": ", measured times are of other kernels or another compiler", "only": ", no other can"}
        lines.append(
            f"            {entry.get('kernel')}: {entry.get('us')} us {kind}{why.get(str(origin), '')}"
        )
        runners_up = entry.get("runners_up")
        for name, us in runners_up.items() if isinstance(runners_up, dict) else ():
            lines.append(f"            then {name}: {us} us")
    return [one_line(line) for line in lines]


def difference_lines(differences: list[Difference]) -> list[str]:
    """One line a difference, or that there is none."""
    if not differences:
        return ["the engines hold the same"]
    return [
        one_line(f"{item.what}: {_value_text(item.left)} -> {_value_text(item.right)}")
        for item in differences
    ]


def _status(target: dict[str, Any]) -> str:
    """What is to be known of a target whose engines haven't run."""
    status = one_line(target["status"])
    return "" if status == RUN else f" ({status})"


def size_text(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(num_bytes)
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _pass_matches(report: Any) -> dict[str, Any]:
    """Pass name -> match count, from a list of {"name", "matches"} or an object."""
    passes = report.get("passes", {}) if isinstance(report, dict) else {}
    if isinstance(passes, dict):
        return passes
    rows = [entry for entry in passes if isinstance(entry, dict)] if isinstance(passes, list) else []
    return {str(entry.get("name")): entry.get("matches") for entry in rows}


def _entry_text(entry: Any) -> str:
    if not isinstance(entry, dict):
        return _value_text(entry)
    return ", ".join(f"{name} {_value_text(value)}" for name, value in entry.items())


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + _entry_text(value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    return str(value)


def _list(items: Any) -> str:
    return ", ".join(str(item) for item in items) or "none"
