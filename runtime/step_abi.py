"""The step ABI: every input and output of one engine step, by name, dtype and shape.

One packed block (memory class `step`) is uploaded per step. Its field offsets follow from the bucket's
capacities alone, so a plan can bake addresses into it. The list is complete for what later targets and
models need; what an engine can't do yet is refused at admission, never silently dropped.

Conventions
  token_ids      a value v >= 0 is a token id; v < 0 means last_token[-1 - v], the id sampled for that row
                 by an earlier step, still on the device.
  slot_mapping   flat KV slot block * block_size + offset of each token; -1 = don't write.
  query_starts   token range of sequence i is query_starts[i] .. query_starts[i + 1].
  seq_lens       length of each sequence including this step's tokens.
  logit_rows     token index (0 .. num_tokens - 1) whose logits are wanted.
"""

import math
from dataclasses import dataclass

import msgspec
import numpy as np

# header words, int32
HEADER_FIELDS = (
    "num_tokens",
    "num_seqs",
    "num_logits",
    "max_query_len",  # longest query of this step
    "num_copies",  # live entries of copy_list
    "num_biases",  # live entries of the bias list
    "step_index_low",
    "step_index_high",
    "num_grammar_masks",  # live rows of grammar_masks
    "num_allowed_masks",  # and of allowed_masks
)
HEADER_WORDS = 16
SYMBOLS = ("num_tokens", "num_seqs", "num_logits")  # symbols of the graph = live counts of the header
FIELD_ALIGNMENT = 64

MAX_LOGPROBS = 20
MAX_BIASES_PER_ROW = 1024  # a request has no more, bans included
MASK_WORD_BITS = 32
IN_PROMPT = 1 << 31  # of a token count: the token is in the prompt


class Bucket(msgspec.Struct, frozen=True):
    """Capacities of one plan; live counts may be anything from 1 up to them."""

    max_tokens: int
    max_seqs: int
    max_logits: int
    max_query_len: int


class CacheGroup(msgspec.Struct, frozen=True):
    """One kind of cache, managed as blocks (or slots) of its own."""

    name: str  # "kv", later "mla", "gdn"
    kind: str  # "paged" or "state"
    block_size: int  # tokens a block holds
    table_width: int  # blocks a sequence may own = ceil(max_seq_len / block_size)
    window: int = 0  # tokens a query sees, itself included; 0 = all


@dataclass(frozen=True)
class Field:
    """One array of the step block; dims are ints or names of Bucket capacities ("max_seqs+1" allowed)."""

    name: str
    dtype: str  # numpy dtype name
    dims: tuple[int | str, ...]


def step_fields(groups: tuple[CacheGroup, ...], vocab_size: int) -> tuple[Field, ...]:
    """All fields of the step block for an engine with these cache groups, in layout order."""
    fields = [
        Field("header", "int32", (HEADER_WORDS,)),
        Field("token_ids", "int32", ("max_tokens",)),
        Field("positions", "int32", ("max_tokens",)),
        Field("query_starts", "int32", ("max_seqs+1",)),
        Field("seq_lens", "int32", ("max_seqs",)),
        Field("row_ids", "int32", ("max_seqs",)),  # row (memory class `rows`) each sequence owns
        Field("logit_rows", "int32", ("max_logits",)),
    ]
    for group in groups:
        if group.kind == "paged":
            fields.append(Field(f"slot_mapping.{group.name}", "int64", ("max_tokens",)))
            # -1 = unused
            fields.append(Field(f"block_tables.{group.name}", "int32", ("max_seqs", group.table_width)))
        else:
            fields.append(Field(f"state_read_slots.{group.name}", "int32", ("max_seqs",)))  # 0 = zeros
            fields.append(Field(f"state_write_slots.{group.name}", "int32", ("max_seqs",)))
        # block (or slot) copies done before the step: (source, destination)
        fields.append(Field(f"copy_list.{group.name}", "int32", ("max_seqs", 2)))
    fields += [
        # sampling, one entry a logit row
        Field("sample_rows", "int32", ("max_logits",)),  # row whose last_token is set; -1 = none
        Field("temperature", "float32", ("max_logits",)),  # 0 = greedy
        Field("top_k", "int32", ("max_logits",)),  # 0 = off
        Field("top_p", "float32", ("max_logits",)),  # 1 = off
        Field("min_p", "float32", ("max_logits",)),  # 0 = off
        Field("repetition_penalty", "float32", ("max_logits",)),  # 1 = off
        Field("presence_penalty", "float32", ("max_logits",)),  # 0 = off
        Field("frequency_penalty", "float32", ("max_logits",)),  # 0 = off
        Field("seed", "uint64", ("max_logits",)),
        Field("output_position", "int32", ("max_logits",)),  # index of the token being sampled in its output
        Field("num_logprobs", "int32", ("max_logits",)),  # -1 = none, 0 = the sampled token's, n = top n too
        Field("mask_rows", "int32", ("max_logits",)),  # row of grammar_masks; -1 = unconstrained
        Field("allowed_rows", "int32", ("max_logits",)),  # row of allowed_masks; -1 = all allowed
        Field(
            "bias_starts", "int32", ("max_logits+1",)
        ),  # row i's: starts[i] .. starts[i + 1] - 1, each id once
        # large and rarely live: a device may copy no more of these than the header's counts say
        Field("bias_token_ids", "int32", ("max_logits", MAX_BIASES_PER_ROW)),
        Field("bias_values", "float32", ("max_logits", MAX_BIASES_PER_ROW)),
        Field("grammar_masks", "uint32", ("max_logits", -(-vocab_size // MASK_WORD_BITS))),
        Field("allowed_masks", "uint32", ("max_logits", -(-vocab_size // MASK_WORD_BITS))),
    ]
    return tuple(fields)


# field at the end of the step block -> header word that counts its live items (of bias lists) or rows (of masks)
LIVE_COUNTS = {
    "bias_token_ids": "num_biases",
    "bias_values": "num_biases",
    "grammar_masks": "num_grammar_masks",
    "allowed_masks": "num_allowed_masks",
}


def live_bytes(field: Field, capacities: dict[str, int], live: int) -> int:
    """Bytes of one of LIVE_COUNTS' fields that are in use."""
    shape, itemsize = resolve_dims(field, capacities), np.dtype(field.dtype).itemsize
    return live * itemsize * (1 if field.name.startswith("bias_") else shape[1])


def output_fields() -> tuple[Field, ...]:
    """What a step leaves for the host (memory class `staging`), one entry a logit row."""
    return (
        Field("sampled_token_ids", "int32", ("max_logits",)),
        Field("sampled_logprobs", "float32", ("max_logits",)),
        Field("sampled_ranks", "int32", ("max_logits",)),  # 1 = the most likely; of the full variant alone
        Field("top_token_ids", "int32", ("max_logits", MAX_LOGPROBS)),
        Field("top_logprobs", "float32", ("max_logits", MAX_LOGPROBS)),
    )


def row_fields(vocab_size: int) -> tuple[Field, ...]:
    """What a running request's row keeps on the device between steps (memory class `rows`)."""
    return (
        Field("last_token", "int32", ("max_rows",)),
        # bit 31: in the prompt; the other bits: times in the output. Of rows with penalties alone
        Field("token_counts", "uint32", ("max_rows", vocab_size)),
    )


def resolve_dims(field: Field, capacities: dict[str, int]) -> tuple[int, ...]:
    """The field's shape in numbers. Raises KeyError for a capacity that isn't given."""
    shape = []
    for dim in field.dims:
        if isinstance(dim, int):
            shape.append(dim)
        else:
            name, _, plus = dim.partition("+")
            shape.append(capacities[name] + int(plus or 0))
    return tuple(shape)


def layout(fields: tuple[Field, ...], capacities: dict[str, int]) -> tuple[dict[str, int], int]:
    """Byte offset of each field, and the block's size in bytes."""
    offsets: dict[str, int] = {}
    end = 0
    for field in fields:
        offsets[field.name] = end
        count = math.prod(resolve_dims(field, capacities))
        num_bytes = count * np.dtype(field.dtype).itemsize
        end += -(-num_bytes // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
    return offsets, end


def bucket_capacities(bucket: Bucket) -> dict[str, int]:
    """The bucket as the capacities `layout` wants."""
    return msgspec.structs.asdict(bucket)


def views(block: np.ndarray, fields: tuple[Field, ...], capacities: dict[str, int]) -> dict[str, np.ndarray]:
    """Named numpy views into a packed block (uint8, at least `layout` bytes); writing them writes the block."""
    offsets, _ = layout(fields, capacities)
    result = {}
    for field in fields:
        shape = resolve_dims(field, capacities)
        dtype = np.dtype(field.dtype)
        start = offsets[field.name]
        stop = start + math.prod(shape) * dtype.itemsize
        result[field.name] = block[start:stop].view(dtype).reshape(shape)
    return result
