"""What a loaded engine tells its front: fixed facts and running counts."""

from typing import Any

import msgspec

from castiron.runtime.engine_options import ServingLimits
from castiron.runtime.manifest import Manifest


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded engine's facts; the same in process and over the wire."""

    model_name: str
    family: str
    vocab_size: int
    max_seq_len: int  # tokens a sequence may have, prompt and output; also what fits in the cache
    built_seq_len: int = 0  # the max_seq_len that the engine was built for
    context_len: int = 0  # that its model was made for; 0: unknown
    asked_seq_len: int = 0  # what max_seq_len would be if the KV cache had room
    max_seqs: int
    max_batched_tokens: int
    block_size: int  # tokens of a cache block
    num_blocks: int
    prefix_cache: bool = True  # whether requests share cached blocks
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    compute: str  # "f32", "bf16", "int8"
    cache_dtype: str
    target_level: str
    num_threads: int
    row_stable: bool
    has_tokenizer: bool  # in the file: grammars are compiled for it
    sample_variants: tuple[str, ...]  # "greedy", "random", "full"
    timings: dict[str, float]  # load_plan_s, device_init_s, load_weights_s, build_graphs_s
    warnings: tuple[str, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts at one moment; the num_* below the line only ever rise, so rates are differences over time."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # those that hold cached prefixes included
    num_cached_blocks: int = 0  # free, and found again by their prefix until their place is needed
    # since the engine was loaded
    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed; again after a preemption
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_cache_query_tokens: int = 0  # looked up in the prefix cache, once for each time a request starts
    num_cache_hit_tokens: int = 0  # of these, found
    busy_s: float = 0.0  # seconds inside steps


def describe_engine(manifest: Manifest, limits: ServingLimits, **serving: Any) -> EngineInfo:
    """The facts of an engine file that serves with these limits; `serving`: the fields they don't tell."""
    context = manifest.model.config.get("max_position_embeddings")
    return EngineInfo(
        model_name=manifest.model.name,
        family=manifest.model.family,
        vocab_size=manifest.model.vocab_size,
        built_seq_len=manifest.profile.max_seq_len,
        context_len=context if isinstance(context, int) else 0,
        asked_seq_len=limits.max_seq_len,
        max_seqs=limits.max_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        bos_token_id=manifest.model.bos_token_id,
        eos_token_ids=manifest.model.eos_token_ids,
        generation_defaults=manifest.model.generation_defaults,
        compute=manifest.quantization.compute,
        cache_dtype=manifest.quantization.cache_dtype,
        target_level=manifest.target.level,
        row_stable=manifest.row_stable,
        **serving,
    )
