"""The engine loop: token ids in, token ids out, one step at a time.

On a device that runs ahead, step n + 1 is scheduled and launched before the ids of step n are read: it takes
them on the device. What the host does for a step so happens while the device computes the next one. A sequence
that turns out to have ended with step n has one more row in step n + 1, whose token is dropped.
"""

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from types import TracebackType

import msgspec
import numpy as np

from castiron.runtime.admission import validate_request
from castiron.runtime.block_hash import Domains, engine_domains
from castiron.runtime.block_manager import BlockManager
from castiron.runtime.cache_groups import tokens_of_blocks
from castiron.runtime.devices.base import Device
from castiron.runtime.engine_info import EngineStats, describe_engine
from castiron.runtime.engine_options import EngineOptions, ServingLimits
from castiron.runtime.errors import RequestError
from castiron.runtime.grammar_compiler import Grammar, GrammarCompiler
from castiron.runtime.logprobs import prompt_logprobs, sampled_logprobs, token_logprobs
from castiron.runtime.manifest import Manifest
from castiron.runtime.messages import AddRequest, RequestOutput, TokenLogprobs
from castiron.runtime.plan_table import FULL, GREEDY, RANDOM, PlanTable
from castiron.runtime.request_trace import (
    Aborted,
    Arrived,
    Recorder,
    TraceHeader,
    TraceWriter,
    header_of,
    stepped,
)
from castiron.runtime.row_table import RowTable
from castiron.runtime.scheduler import ScheduledStep, Scheduler
from castiron.runtime.sequence import Sequence
from castiron.runtime.step_builder import fill_step

_COMPILE_WAIT_S = 0.01  # for a grammar, where nothing else is to do
_NOTHING_ALLOWED = "all tokens that the grammar allows are banned by other parameters: leave those out"


class LLMEngine:
    """One engine on one device, with the requests it is serving. Not for several threads at once."""

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        limits: ServingLimits,
        *,
        num_threads: int = 1,
        load_plan_s: float = 0.0,
        prefix_cache: bool = True,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Serve with a loaded device; its caches may lower `limits.max_seq_len` (see EngineInfo.warnings)."""
        groups = device.header.cache_groups
        max_cached_tokens = min(
            tokens_of_blocks(group, device.num_blocks[group.name], limits.max_batched_tokens)
            for group in groups
        )
        max_seq_len = min(limits.max_seq_len, max_cached_tokens)
        warnings: tuple[str, ...] = ()
        if max_seq_len < limits.max_seq_len:
            warnings = (
                f"the KV cache holds {max_cached_tokens} tokens, so sequences are limited to {max_seq_len} "
                f"tokens instead of {limits.max_seq_len}: raise the KV memory to allow more",
            )
        self.device = device
        self.rows = RowTable(limits.max_seqs, max_seq_len, manifest.model.vocab_size)
        self.blocks = BlockManager(
            groups,
            device.num_blocks,
            limits.max_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            domains=engine_domains(manifest) if prefix_cache else None,
        )
        self.plans = PlanTable(device.header, limits)
        self.scheduler = Scheduler(self.rows, self.blocks, limits.max_batched_tokens, self.plans.max_logits)
        self.timings = {"load_plan_s": load_plan_s, **device.timings}
        self.info = describe_engine(
            manifest,
            limits,
            max_seq_len=max_seq_len,
            block_size=groups[0].block_size,
            num_blocks=self.blocks.num_blocks,
            prefix_cache=prefix_cache,
            num_threads=num_threads,
            has_tokenizer=grammars is not None,
            sample_variants=self.plans.variants,
            timings=self.timings,
            warnings=warnings,
        )
        self._grammars = grammars
        # requests whose grammar isn't ready
        self._compiling: dict[str, tuple[AddRequest, Future[Grammar]]] = {}
        self._recorder: Recorder | None = None
        self._early_outputs: list[RequestOutput] = []  # of requests that ended between steps
        self._in_flight: ScheduledStep | None = None  # launched, not read
        self._read_until_s = 0.0
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_finished = 0
        self._num_aborted = 0
        self._busy_s = 0.0

    @classmethod
    def load(cls, path: str | os.PathLike[str], options: EngineOptions | None = None) -> "LLMEngine":
        """The engine file at `path` on the device it was built for.

        Raises InputError for options or a file that can't be read, EngineFormatError for a damaged file and
        EngineTargetError if this machine can't run it.
        """
        # imported here: only an engine on a real device needs a device's library
        from castiron.runtime.load_engine import load_engine

        options = options or EngineOptions()
        loaded = load_engine(path, options)
        engine = cls(
            loaded.manifest,
            loaded.device,
            loaded.limits,
            prefix_cache=loaded.prefix_cache,
            num_threads=loaded.num_threads,
            load_plan_s=loaded.load_plan_s,
            grammars=loaded.grammars,
        )
        if options.record is not None:
            try:
                engine.start_recording(TraceWriter(options.record))
            except BaseException:
                engine.close()
                raise
        return engine

    def start_recording(self, recorder: Recorder) -> TraceHeader:
        """From now on give everything that decides a schedule to the recorder; its header. The engine must be idle."""
        assert not self.has_unfinished() and self._num_steps == 0, "a record starts with the engine"
        header = header_of(self.info)
        recorder.record(header)
        self._recorder = recorder
        return header

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the device; the engine can't be used afterwards."""
        if self._recorder is not None:
            self._recorder.close()
        if self._grammars is not None:
            self._grammars.close()
        self.device.close()

    def validate(self, request: AddRequest) -> None:
        """Raise RequestError unless the request can be served; changes nothing."""
        validate_request(request, self.info)

    def add_request(self, request: AddRequest) -> None:
        """Queue a request. Raises RequestError if it can't be served or its id is in use."""
        self.validate(request)
        if request.request_id in self.scheduler or request.request_id in self._compiling:
            raise RequestError(
                f"request_id {request.request_id!r} is in use, expected a new one", "request_id"
            )
        if request.grammar is None:
            self._queue(request)
        else:
            assert self._grammars is not None, "validated"
            self._compiling[request.request_id] = request, self._grammars.submit(request.grammar)

    def _queue(self, request: AddRequest, grammar: Grammar | None = None) -> None:
        keys = self.blocks.new_keys(_domains(request))
        sequence = Sequence.from_request(request, self._num_arrivals, self.info.eos_token_ids, keys, grammar)
        self._num_arrivals += 1
        if self._recorder is not None:
            sampling = msgspec.structs.replace(request.sampling, seed=sequence.seed)
            self._recorder.record(Arrived(msgspec.structs.replace(request, sampling=sampling)))
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request; its last output comes from the next step. False if no such request is unfinished."""
        compiling = self._compiling.pop(request_id, None)
        if compiling is not None:
            compiling[1].cancel()
        elif self.scheduler.remove(request_id) is None:
            return False
        elif self._recorder is not None:
            self._recorder.record(Aborted(request_id))
        self._num_aborted += 1
        self._early_outputs.append(RequestOutput(request_id, (), finish_reason="abort"))
        return True

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._early_outputs or self._compiling) or self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Launch one step and read one; what it produced, an output for each request that got a token or ended.

        Raises WorkFailedError if the device failed: the engine is lost then.
        """
        if self._compiling:
            self._queue_compiled()
        outputs, self._early_outputs = self._early_outputs, []
        step = launched = self.scheduler.schedule()
        if step is not None:
            self._launch(step)
        step, self._in_flight = self._in_flight, step
        if step is not None:
            outputs += self._read(step)
        if self._in_flight is not None and not self._may_run_ahead(self._in_flight):
            step, self._in_flight = self._in_flight, None
            outputs += self._read(step)
        if self._recorder is not None:
            self._recorder.record(stepped(launched, outputs))
        return outputs

    def _queue_compiled(self) -> None:
        """Let requests whose grammar is ready wait for their turn, and end those it is none of."""
        if not self.scheduler.has_unfinished():
            wait([future for _, future in self._compiling.values()], _COMPILE_WAIT_S, FIRST_COMPLETED)
        for request_id, (request, future) in tuple(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            try:
                self._queue(request, future.result())
            except RequestError as error:
                self._num_finished += 1
                self._early_outputs.append(
                    RequestOutput(request_id, (), finish_reason="error", error=str(error))
                )

    def _may_run_ahead(self, step: ScheduledStep) -> bool:
        """Whether the next step may be launched before this one is read: not if its logits are read, too."""
        return self.device.runs_ahead and not step.prompt_logits and self.scheduler.has_unfinished()

    def generate(self, requests: Iterable[AddRequest]) -> Iterator[RequestOutput]:
        """Add all requests and step until they are done; leaving early aborts the rest.

        Raises RequestError before anything runs if one can't be served.
        """
        unfinished: set[str] = set()
        try:
            for request in requests:
                self.add_request(request)
                unfinished.add(request.request_id)
            while unfinished:
                for output in self.step():
                    if output.finish_reason is not None:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            for request_id in unfinished:
                self.abort(request_id)
            # nobody is left to be told of these aborts
            self._early_outputs = [o for o in self._early_outputs if o.request_id not in unfinished]

    def stats(self) -> EngineStats:
        """Counts as of now."""
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + len(self._compiling),
            num_blocks=self.blocks.num_blocks,
            num_free_blocks=self.blocks.num_free_blocks,
            num_cached_blocks=self.blocks.num_cached_blocks,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            num_preemptions=self.scheduler.num_preemptions,
            num_cache_query_tokens=self.scheduler.num_cache_query_tokens,
            num_cache_hit_tokens=self.scheduler.num_cache_hit_tokens,
            busy_s=self._busy_s,
        )

    def _launch(self, step: ScheduledStep) -> None:
        """Give the step to the device; the tokens it samples are pending until it is read."""
        start_s = time.perf_counter()
        given = step.input
        num_tokens = int(given.counts.sum())
        forward = self.plans.choose_forward(
            num_tokens, len(given.counts), max(1, len(given.logit_tokens)), int(given.counts.max())
        )
        sample = None
        if step.sampled:
            variant = self._variant(given.sample_rows)
            sample = self.plans.sample_of(forward, variant)
            given = replace(given, is_full=variant == FULL)
        for row, counts in self.rows.take_new_counts():
            self.device.write_row("token_counts", row, counts)
        fill_step(self.device.step_views(forward), given, self.rows, self.blocks, self._num_steps)
        self.device.launch(forward, sample)
        for sequence in step.sampled:
            sequence.num_pending_tokens += 1
        if step.sampled:
            ends = given.starts + given.counts
            last_tokens = given.logit_tokens[: len(step.sampled)]
            reaches_end = np.searchsorted(np.cumsum(given.counts), last_tokens + 1)
            self.rows.expect_tokens(given.sample_rows, ends[reaches_end])
        self._num_steps += 1
        self._num_prompt_tokens += num_tokens - step.num_decoding
        if self._in_flight is None:
            self._read_until_s = start_s  # the device was idle until now

    def _variant(self, rows: np.ndarray) -> str:
        """The least sampling variant that does all these rows ask for."""
        if self.rows.needs_full[rows].any():
            return FULL
        is_random = self.rows.temperature[rows] > 0
        if not is_random.any():
            return GREEDY
        wants_ranks = (self.rows.num_logprobs[rows][is_random] >= 0).any()  # a greedy token's is 1
        return FULL if wants_ranks and FULL in self.plans.variants else RANDOM

    def _read(self, step: ScheduledStep) -> list[RequestOutput]:
        """Wait for a launched step and give its tokens out."""
        sampled = self.device.wait()
        now_s = time.perf_counter()
        self._busy_s += now_s - self._read_until_s
        self._read_until_s = now_s
        self.scheduler.confirm(step)
        if step.prompt_logits:
            self._read_prompt_logprobs(step)
        return self._append_tokens(step, sampled) if step.sampled else []

    def _read_prompt_logprobs(self, step: ScheduledStep) -> None:
        """Keep the log probabilities of the prompt tokens that follow this step's."""
        logits = self.device.read_logits(len(step.input.logit_tokens))
        place = len(step.sampled)
        for sequence, start, count in step.prompt_logits:
            token_ids = sequence.prompt_token_ids[start + 1 : start + 1 + count]
            num_top = sequence.sampling.prompt_logprobs or 0
            found = token_logprobs(logits[place : place + count], token_ids, num_top)
            sequence.prompt_logprobs[start : start + count] = found
            place += count

    def _append_tokens(self, step: ScheduledStep, sampled: dict[str, np.ndarray]) -> list[RequestOutput]:
        """Give each sampled sequence its token; finished ones leave, and what they get later is dropped."""
        outputs: list[RequestOutput] = []
        known = self.rows.token_ids
        token_ids = sampled["sampled_token_ids"][: len(step.sampled)].tolist()
        for index, (sequence, token_id) in enumerate(zip(step.sampled, token_ids, strict=True)):
            sequence.num_pending_tokens -= 1
            if sequence.is_finished:
                continue
            if sequence.row >= 0:
                known[sequence.row, sequence.num_tokens] = token_id
            finish_reason = sequence.append(token_id)
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sequence.sampling.logprobs is not None:
                logprobs = (sampled_logprobs(sampled, index, sequence.sampling),)
            outputs.append(
                RequestOutput(
                    sequence.request_id,
                    (token_id,),
                    logprobs,
                    finish_reason,
                    token_id if finish_reason == "stop" and token_id in sequence.stop_token_ids else None,
                    sequence.num_cached_tokens,
                    error=_NOTHING_ALLOWED if finish_reason == "error" else None,
                    prompt_logprobs=prompt_logprobs(sequence),
                )
            )
            if finish_reason is not None:
                self.scheduler.remove(sequence.request_id)
                self._num_finished += 1
        self._num_generated_tokens += len(outputs)
        return outputs


def _domains(request: AddRequest) -> Domains:
    """What a request's cached blocks must have in common with another's, beside their tokens."""
    return () if request.cache_salt is None else (("cache_salt", request.cache_salt.encode()),)
