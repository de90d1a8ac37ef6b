"""A device without a model: logits are a function of a sequence's content, read the way a kernel reads it.

A step writes each token's id and position to pretend caches by slot and reads every sequence back through its
block table (simulated_caches.py). A wrong slot, table, position, length or token therefore gives other tokens
than `expected_tokens`, and what can be checked outright is asserted.
"""

import functools

import msgspec
import numpy as np
from simulated_caches import prefix_hashes, simulated_cache
from synthetic_engine import make_manifest

from castiron.runtime.engine_options import EngineOptions, ServingLimits, resolve_limits
from castiron.runtime.errors import WorkFailedError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.manifest import Manifest, ModelInfo, Profile
from castiron.runtime.messages import AddRequest, RequestOutput
from castiron.runtime.plan_format import CacheTensor, Plan, PlanHeader
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.step_abi import (
    MAX_LOGPROBS,
    Bucket,
    CacheGroup,
    bucket_capacities,
    layout,
    output_fields,
    step_fields,
    views,
)

VOCAB_SIZE = 97
EOS_TOKEN_ID = 96
BLOCK_SIZE = 4
MAX_SEQ_LEN = 128
_TABLE_ROWS = 4093
KV = CacheGroup("kv", "paged", BLOCK_SIZE, -(-MAX_SEQ_LEN // BLOCK_SIZE))


def simulated_header(profile: Profile, groups: tuple[CacheGroup, ...] = (KV,)) -> PlanHeader:
    """Two forward plans, decode and mixed, with a greedy and a random sampling plan each."""
    groups = tuple(
        msgspec.structs.replace(group, table_width=-(-profile.max_seq_len // group.block_size))
        for group in groups
    )
    buckets = {
        "decode": Bucket(profile.max_seqs, profile.max_seqs, profile.max_seqs, 1),
        "mixed": Bucket(
            profile.max_batched_tokens, profile.max_seqs, profile.max_seqs, profile.max_batched_tokens
        ),
    }
    plans = [Plan(f"forward.{name}", "forward", name, bucket, 0, 0) for name, bucket in buckets.items()]
    for variant in ("greedy", "random"):
        plans += [Plan(f"sample.{variant}.{n}", "sample", n, b, 0, 0) for n, b in buckets.items()]
    return PlanHeader(
        kernels=(),
        plans=tuple(plans),
        cache_groups=groups,
        cache_tensors=tuple(
            CacheTensor(f"cache.{g.name}", g.name, g.block_size * 16, "f32", (2, 1, g.block_size, 2))
            for g in groups
        ),
        tensor_maps=(),
        vocab_size=VOCAB_SIZE,
        max_rows=profile.max_seqs,
        arena_bytes=0,
        weights_bytes=0,
        rows_bytes=0,
        counters_bytes=0,
        exchange_bytes=0,
        staging_bytes=0,
        logits_offset=0,
    )


def simulated_manifest(profile: Profile) -> Manifest:
    model = ModelInfo("simulated", "llama", {}, VOCAB_SIZE, profile.max_seq_len, 0, None, (EOS_TOKEN_ID,), {})
    return msgspec.structs.replace(
        make_manifest("generic", ()), model=model, profile=profile, weights_source="dummy"
    )


class SimulatedDevice:
    """Implements castiron.runtime.devices.base.Device over pretend caches."""

    num_threads = 1

    def __init__(self, header: PlanHeader, num_blocks: int, runs_ahead: bool = False) -> None:
        self.header = header
        self.runs_ahead = runs_ahead
        self._waiting: list[dict[str, np.ndarray]] = []  # outputs of launches, oldest first
        self.num_blocks = {group.name: num_blocks for group in header.cache_groups}
        self.timings = {"device_init_s": 0.0, "load_weights_s": 0.0, "build_graphs_s": 0.0}
        self.caches = [simulated_cache(group, num_blocks) for group in header.cache_groups]
        self.last_token = np.full(header.max_rows, -1, np.int32)
        self.launches: list[tuple[str, str | None]] = []  # plan names
        self.steps: list[dict[str, np.ndarray]] = []  # live parts of each step, if `record`
        self.record = False
        self.fail_at_launch: int | None = None
        fields = step_fields(header.cache_groups, header.vocab_size)
        capacities = [bucket_capacities(plan.bucket) for plan in header.plans]
        self._slot = np.zeros(max(layout(fields, c)[1] for c in capacities), np.uint8)
        self._views = [views(self._slot, fields, c) for c in capacities]
        self._outputs: dict[str, np.ndarray] = {}
        self._logits = np.empty((0, header.vocab_size), np.float32)

    def step_views(self, forward_index: int) -> dict[str, np.ndarray]:
        self._slot[:] = 0xAB  # whatever isn't filled is nonsense
        return self._views[forward_index]

    def write_row(self, field: str, row: int, values: np.ndarray) -> None:
        raise AssertionError("no request of this vocabulary's tests has penalties")

    def launch(self, forward_index: int, sample_index: int | None) -> None:
        forward = self.header.plans[forward_index]
        sample = None if sample_index is None else self.header.plans[sample_index]
        assert forward.kind == "forward"
        assert sample is None or (sample.kind, sample.bucket) == ("sample", forward.bucket)
        self.launches.append((forward.name, sample.name if sample else None))
        fields = self._views[forward_index]
        self._forward(fields, forward.bucket)
        if sample is not None:
            self._sample(fields, sample)
        self._waiting.append(self._outputs if sample is not None else {})
        assert len(self._waiting) <= (2 if self.runs_ahead else 1), "more launches than the host may be ahead"

    def wait(self) -> dict[str, np.ndarray]:
        if self.fail_at_launch is not None and len(self.launches) > self.fail_at_launch:
            raise WorkFailedError("the simulated device was told to fail")
        return self._waiting.pop(0)

    def read_logits(self, num_logits: int) -> np.ndarray:
        assert num_logits == len(self._logits)
        return self._logits.copy()

    def close(self) -> None:
        self.caches = []

    def _forward(self, fields: dict[str, np.ndarray], bucket: Bucket) -> None:
        num_tokens, num_seqs, num_logits, max_query_len, num_copies, num_biases = fields["header"][
            :6
        ].tolist()
        assert 1 <= num_tokens <= bucket.max_tokens and 1 <= num_seqs <= bucket.max_seqs
        assert 1 <= num_logits <= bucket.max_logits and num_copies == num_biases == 0
        starts = fields["query_starts"][: num_seqs + 1].tolist()
        assert starts[0] == 0 and starts[-1] == num_tokens and (np.diff(starts) >= 1).all()
        assert max(np.diff(starts)) == max_query_len <= bucket.max_query_len
        token_ids = fields["token_ids"][:num_tokens].copy()
        fed_back = token_ids < 0
        token_ids[fed_back] = self.last_token[-1 - token_ids[fed_back]]
        row_ids = fields["row_ids"][:num_seqs]
        assert len(set(row_ids.tolist())) == num_seqs
        hidden = np.zeros(num_tokens, np.uint64)
        for cache in self.caches:
            cache.check_step(fields, num_tokens, num_seqs)
        for i in range(num_seqs):
            queries = slice(starts[i], starts[i + 1])
            start = int(fields["seq_lens"][i]) - (starts[i + 1] - starts[i])
            assert (fields["positions"][queries] == np.arange(start, fields["seq_lens"][i])).all()
            hashes = [cache.run(fields, i, queries, token_ids[queries], start) for cache in self.caches]
            assert all((h == hashes[0]).all() for h in hashes), "all groups agree on the prefix"
            hidden[queries] = hashes[0]
        rows = fields["logit_rows"][:num_logits]
        assert rows.min() >= 0 and rows.max() < num_tokens
        self._logits = np.stack([logits_of(h) for h in hidden[rows]])
        if self.record:
            live = {"token_ids": num_tokens, "positions": num_tokens}
            live |= {"query_starts": num_seqs + 1, "seq_lens": num_seqs, "row_ids": num_seqs}
            live |= {"logit_rows": num_logits, "sample_rows": num_logits}
            live |= {n: num_tokens for n in fields if n.startswith("slot_mapping.")}
            live |= {n: num_seqs for n in fields if n.startswith(("block_tables.", "state_"))}
            self.steps.append({name: fields[name][:n].copy() for name, n in live.items()})

    def _sample(self, fields: dict[str, np.ndarray], sample: Plan) -> None:
        count = len(self._logits)
        outputs = {
            f.name: np.full((count, *f.dims[1:]), -7, f.dtype)  # type: ignore[arg-type]
            for f in output_fields()
        }
        for i, logits in enumerate(self._logits):
            values = {
                name: fields[name][i].item() for name in ("temperature", "top_k", "top_p", "min_p", "seed")
            }
            if values["temperature"] == 0:
                token_id = int(logits.argmax())
            else:
                assert sample.name.startswith("sample.random")
                token_id = random_token(logits, int(fields["output_position"][i]), **values)
            logprobs = logits - np.log(np.exp(logits).sum())
            outputs["sampled_token_ids"][i] = token_id
            num_logprobs = int(fields["num_logprobs"][i])
            assert -1 <= num_logprobs <= MAX_LOGPROBS
            if num_logprobs >= 0:
                order = np.argsort(-logprobs, kind="stable")[:MAX_LOGPROBS]
                outputs["sampled_logprobs"][i] = logprobs[token_id]
                outputs["top_token_ids"][i] = order
                outputs["top_logprobs"][i] = logprobs[order]
            row = int(fields["sample_rows"][i])
            if row >= 0:
                self.last_token[row] = token_id
        self._outputs = outputs


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits and noise to pick rows of by hash."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((_TABLE_ROWS, VOCAB_SIZE), np.float32)
    return logits, generator.gumbel(size=(_TABLE_ROWS, VOCAB_SIZE))


def logits_of(prefix_hash: np.uint64) -> np.ndarray:
    """float32 [vocab_size]."""
    return _tables()[0][int(prefix_hash) % _TABLE_ROWS]


def random_token(
    logits: np.ndarray,
    output_position: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> int:
    """A sample that any of its arguments changes."""
    key = hash((seed, output_position, temperature, top_k, top_p, min_p))
    return int((logits / temperature + _tables()[1][key % _TABLE_ROWS]).argmax())


def expected_tokens(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """What the request must give, computed without an engine."""
    token_ids = list(prompt)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS_TOKEN_ID})
    for position in range(sampling.max_tokens):
        logits = logits_of(prefix_hashes(np.array(token_ids))[-1])
        if sampling.temperature == 0:
            token_id = int(logits.argmax())
        else:
            assert sampling.seed is not None
            temperature, top_p, min_p = (
                float(np.float32(x)) for x in (sampling.temperature, sampling.top_p, sampling.min_p)
            )
            token_id = random_token(
                logits, position, temperature, sampling.top_k, top_p, min_p, sampling.seed
            )
        token_ids.append(token_id)
        if token_id in stops:
            break
    return token_ids[len(prompt) :]


def simulated_engine(
    num_blocks: int = 64,
    max_seqs: int = 8,
    max_seq_len: int = MAX_SEQ_LEN,
    max_batched_tokens: int = 32,
    options: EngineOptions | None = None,
    runs_ahead: bool = False,
    groups: tuple[CacheGroup, ...] = (KV,),
) -> LLMEngine:
    """An LLMEngine on a SimulatedDevice with `num_blocks` of each cache group."""
    options = options or EngineOptions()
    profile = Profile(max_seqs, max_seq_len, max_batched_tokens)
    limits: ServingLimits = resolve_limits(options, profile)
    device = SimulatedDevice(simulated_header(profile, groups), num_blocks, runs_ahead)
    return LLMEngine(simulated_manifest(profile), device, limits, prefix_cache=options.prefix_cache)


def device_of(engine: LLMEngine) -> SimulatedDevice:
    assert isinstance(engine.device, SimulatedDevice)
    return engine.device


def request(
    request_id: str, prompt: tuple[int, ...], max_tokens: int = 4, priority: int = 0, **sampling: object
) -> AddRequest:
    sampling = {"ignore_eos": True, **sampling}
    salt = sampling.pop("cache_salt", None)
    return AddRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **sampling), priority, salt)  # type: ignore[arg-type]


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until done, checking integrity after each step; outputs by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_integrity()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]
