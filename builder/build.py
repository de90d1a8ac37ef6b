"""A checkpoint becomes an engine file. `build_engine` is the builder's table of contents."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from castiron.builder.background import Background
from castiron.builder.checkpoint import Checkpoint
from castiron.builder.checkpoint.pack_quantized import scale_warnings
from castiron.builder.choose_schemes import choose_schemes
from castiron.builder.collection_paused import collection_paused
from castiron.builder.describe_build import describe_plan_text, size_text
from castiron.builder.dummy_tensors import dummy_tensors
from castiron.builder.dump_passes import check_dump_folder
from castiron.builder.golden import MEMBER as GOLDEN_MEMBER
from castiron.builder.golden import GoldenMember, compute_golden, golden_cases, why_no_golden
from castiron.builder.graph import Program
from castiron.builder.kernel_files import KernelFiles, compile_for_cpu, compile_for_cuda
from castiron.builder.make_manifest import make_manifest, model_info
from castiron.builder.memory_needs import check_fits, machine_memory_bytes, memory_needs
from castiron.builder.model_parameters import bind_model
from castiron.builder.model_source import open_model
from castiron.builder.options import BuildOptions
from castiron.builder.pack_weights import checkpoint_chunks, random_chunks, write_weights
from castiron.builder.parameters import Parameter
from castiron.builder.phases import Phases
from castiron.builder.pipeline import PASSES, PassResult, optimize
from castiron.builder.plan.buckets import MIXED
from castiron.builder.plan.planner import plan_engine
from castiron.builder.plan.tactics import tactics_text
from castiron.builder.plan.tuning import plan_tuning
from castiron.builder.plan.weights import layout_weights
from castiron.builder.profile import resolve_profile
from castiron.builder.quantization_error import relative_error
from castiron.builder.report import MEMBER as REPORT_MEMBER
from castiron.builder.report import encode_report, make_report, scheme_sizes
from castiron.builder.stages import OpenedModel, PlannedBuild, TracedModel
from castiron.builder.stored_tactics import stored_tactics
from castiron.builder.targets import Target, resolve_target
from castiron.builder.tokenizer import build_tokenizer
from castiron.builder.trace import TraceOptions, trace_forward, trace_sampler
from castiron.builder.weight_values import LoadParameter, checkpoint_values, made_up_values
from castiron.plugins_cuda.source_hash import compiler_version
from castiron.runtime.dummy_weights import MEMBER as DUMMY_MEMBER
from castiron.runtime.dummy_weights import encode_dummy_tensors
from castiron.runtime.engine_file_writer import EngineFileWriter
from castiron.runtime.errors import CheckpointError, InputError
from castiron.runtime.manifest import (
    PURPOSE_SERVING,
    PURPOSE_TUNING,
    Manifest,
    QuantizationInfo,
    WeightsFile,
)
from castiron.runtime.output_file import check_output_file
from castiron.runtime.peak_memory import peak_memory_bytes
from castiron.runtime.plan_format import encode_plan
from castiron.runtime.step_abi import CacheGroup
from castiron.runtime.tuning_format import MEMBER as TUNING_MEMBER

SAMPLING_VARIANTS = ("greedy", "random")


@dataclass(frozen=True)
class BuildResult:
    """What a build made."""

    manifest: Manifest | None  # None: a dry run
    report: dict[str, Any]
    seconds: dict[str, float]  # phase -> seconds
    peak_memory_bytes: int


def build_engine(options: BuildOptions, quiet: bool = False) -> BuildResult:
    """Build the engine `options` ask for; progress goes to standard error unless `quiet`.

    The file appears under its name only when it is complete. Raises CastironError for all a user can act on.
    """
    phases = Phases(options.max_build_seconds, quiet)
    target = resolve_target(options.target)
    if options.tune:  # it times kernels: their weights may be any
        options = replace(options, weights="dummy")
    if (options.tune or options.tactics is not None) and target.kind != "cuda":
        flag = "--tune" if options.tune else "--tactics"
        raise InputError(
            f"{flag} is for CUDA targets, {target.name} has one kernel for each op: leave it out"
        )
    if options.output is not None:
        check_output_file(options.output, ".engine", options.model)
    if options.dump_passes is not None:
        check_dump_folder(options.dump_passes)
    with _naming(options.model), ExitStack() as stack:
        opened = _open(options, target, phases, stack)
        kernels: Background[KernelFiles] | None = None
        if target.kind == "cpu" and not options.dry_run:  # compiles beside the following phases
            kernels = stack.enter_context(Background(lambda _: compile_for_cpu(target)))
        traced = _trace(target, opened, phases)
        golden = None
        if not options.dry_run and options.weights == "file":
            stage0_parameters = list(traced.stage0.parameters.values())
            values = checkpoint_values(opened.checkpoint)
            golden = stack.enter_context(_start_golden(target, opened, traced, stage0_parameters, values))
        built = _plan(options, target, opened, traced, phases)
        if options.dry_run:
            report = _report(options, target, opened, built, "none: dry run")
            return _dry_run(target, opened, built, report, phases)
        if kernels is None:
            planned, is_dummy = built.planned, options.weights == "dummy"
            kernels = stack.enter_context(
                Background(lambda keep_going: compile_for_cuda(target, planned, keep_going, is_dummy))
            )
        if options.tune:
            golden = stack.enter_context(Background(lambda _: GoldenMember("none: a tuning engine", b"")))
        if golden is None:  # made-up weights are those of the merged parameters
            parameters = list(built.forward.parameters.values())
            values = made_up_values(parameters)
            golden = stack.enter_context(_start_golden(target, opened, traced, parameters, values))
        return _write(options, target, opened, built, kernels, golden, phases)


@contextmanager
def _naming(model: str) -> Iterator[None]:
    """Errors of the checkpoint name the model, even those raised where only its tensors are known."""
    try:
        yield
    except CheckpointError as error:
        if model in str(error):
            raise
        raise CheckpointError(f"{model}: {error}") from error


def _open(options: BuildOptions, target: Target, phases: Phases, stack: ExitStack) -> OpenedModel:
    with phases.phase("open") as notes:
        checkpoint, is_alias = open_model(options.model, options.weights)
        stack.enter_context(checkpoint)
        model = bind_model(checkpoint)
        if options.weights == "file":
            model = replace(model, warnings=(*model.warnings, *scale_warnings(checkpoint)))
        parameters, compute = choose_schemes(model.parameters, options.quantize, options.compute, target)
        profile = resolve_profile(options, target, model.config)
        tokenizer = None if is_alias else build_tokenizer(checkpoint)
        notes.append(f"{model.family.name} from {checkpoint.source_format}, compute {compute}")
    for warning in (*target.warnings, *model.warnings):
        phases.say(f"warning: {warning}")
    table_width = -(-profile.max_seq_len // target.block_size)
    group = CacheGroup("kv", "paged", target.block_size, table_width)
    return OpenedModel(checkpoint, model, parameters, compute, tokenizer, profile, group)


def _trace(target: Target, opened: OpenedModel, phases: Phases) -> TracedModel:
    with phases.phase("trace") as notes, collection_paused():
        config = opened.model.config
        dtype = target.cache_dtype(opened.compute)
        traced = TraceOptions(opened.group.block_size, opened.group.table_width, dtype)
        forward = trace_forward(opened.model.family, config, opened.parameters, traced)
        samplers = [trace_sampler(variant, config.vocab_size) for variant in SAMPLING_VARIANTS]
        stage0 = replace(forward, model=forward.model.clone(), parameters=dict(forward.parameters))
        notes.append(f"{len(forward.graph)} nodes")
    return TracedModel(stage0, forward, samplers)


def _start_golden(
    target: Target,
    opened: OpenedModel,
    traced: TracedModel,
    loaded: list[Parameter],
    load_parameter: LoadParameter,
) -> Background[GoldenMember]:
    """Golden values computed beside the following phases. `loaded`: what `load_parameter` holds in memory."""
    bucket = next(bucket for ladder, bucket in target.buckets(opened.profile) if ladder == MIXED)
    vocab_size = opened.model.config.vocab_size

    def work(keep_going: Callable[[], None]) -> GoldenMember:
        reason = why_no_golden(loaded)
        if reason:
            return GoldenMember(f"none: {reason}", b"")
        cases = golden_cases(vocab_size, _special_ids(opened), bucket, opened.profile.max_seq_len)
        data = compute_golden(traced.stage0, cases, opened.group, load_parameter, opened.compute, keep_going)
        return GoldenMember("full", data)

    return Background(work)


def _plan(
    options: BuildOptions, target: Target, opened: OpenedModel, traced: TracedModel, phases: Phases
) -> PlannedBuild:
    forward = traced.forward
    with phases.phase("optimize") as notes:
        passes = optimize(forward, opened.compute, options.dump_passes, PASSES[target.kind])
        notes.append(f"{len(forward.graph)} nodes left, {sum(p.matches for p in passes)} matches")
    if options.tune:
        return _plan_tuning(target, opened, traced, passes, phases)
    with phases.phase("plan") as notes:
        layout = layout_weights(forward.parameters.values())
        planned = plan_engine(
            forward,
            traced.samplers,
            (opened.group,),
            target.buckets(opened.profile),
            layout,
            opened.model.config.vocab_size,
            # a finished sequence's row may still be in flight while its successor starts
            max_rows=2 * opened.profile.max_seqs,
            chooser=target.kernel_chooser(stored_tactics(options, target)),
            batch_invariant=options.batch_invariant and not target.is_row_stable,
        )
        needs = memory_needs(planned.header, opened.profile)
        if target.is_local:
            check_fits(needs, machine_memory_bytes())
        notes.append(f"{len(planned.arrays.records)} records, {size_text(needs.minimum)} for one sequence")
        if tactics := tactics_text(planned.tactics.values()):
            notes.append(tactics)
    return PlannedBuild(forward, passes, layout, planned)


def _plan_tuning(
    target: Target, opened: OpenedModel, traced: TracedModel, passes: list[PassResult], phases: Phases
) -> PlannedBuild:
    with phases.phase("plan") as notes:
        tuning = plan_tuning(
            traced.forward,
            traced.samplers,
            opened.group,
            target.buckets(opened.profile),
            opened.model.config.vocab_size,
            opened.profile,
            target.kernel_chooser(),
            target.level,
            compiler_version(),
        )
        notes.append(f"{len(tuning.planned.arrays.records)} records; {tuning.text}")
    if not tuning.info.cases:
        raise InputError("no launch of this model has more than one kernel: there is nothing to tune")
    return PlannedBuild(traced.forward, passes, tuning.layout, tuning.planned, tuning)


def _dry_run(
    target: Target, opened: OpenedModel, built: PlannedBuild, report: dict[str, Any], phases: Phases
) -> BuildResult:
    needs = memory_needs(built.planned.header, opened.profile)
    name, schemes = opened.checkpoint.name, report["schemes"]
    if built.tuning is not None:
        print(f"{name} on {target.name}, {size_text(built.layout.num_bytes)} of weights; {built.tuning.text}")
        return BuildResult(None, report, phases.seconds, peak_memory_bytes())
    print(describe_plan_text(name, target, opened.compute, opened.profile, built.planned, needs, schemes))
    return BuildResult(None, report, phases.seconds, peak_memory_bytes())


def _write(
    options: BuildOptions,
    target: Target,
    opened: OpenedModel,
    built: PlannedBuild,
    kernels: Background[KernelFiles],
    golden: Background[GoldenMember],
    phases: Phases,
) -> BuildResult:
    assert options.output is not None

    def between() -> None:
        kernels.check()
        golden.check()
        phases.check_time()

    expected_bytes = built.layout.num_bytes if options.weights != "dummy" else built.layout.constants_bytes
    with (
        EngineFileWriter(options.output, expected_bytes) as writer,
        Background(lambda _: _source_hashes(options, opened.checkpoint)) as hashes,
    ):
        writer.add("graph.onnx", _graph_bytes(built.forward))
        for name, data in encode_plan(built.planned.header, built.planned.arrays).items():
            writer.add(name, data)
        if built.tuning is not None:
            writer.add(TUNING_MEMBER, msgspec.json.encode(built.tuning.info))
        elif opened.tokenizer is not None:
            for name, data in opened.tokenizer.members.items():
                writer.add(name, data)
        parameters = built.parameters
        with phases.phase("pack") as notes:
            chunks = checkpoint_chunks(opened.checkpoint) if options.weights == "file" else random_chunks
            if options.weights == "dummy":
                writer.add(DUMMY_MEMBER, encode_dummy_tensors(dummy_tensors(parameters, built.layout)))
                parameters = [p for p in parameters if p.constant is not None]
            weights = write_weights(writer, parameters, built.layout, chunks, between)
            notes.append(size_text(built.layout.num_bytes))
        with phases.phase("golden") as notes:
            golden_level, golden_data = golden.result()
            if golden_data:
                writer.add(GOLDEN_MEMBER, golden_data)
            notes.append(golden_level)
        with phases.phase("kernels") as notes:
            for name, data in kernels.result().members.items():
                writer.add(name, data)
            notes.append(kernels.result().note)
        report = _report(options, target, opened, built, golden_level)
        writer.add(REPORT_MEMBER, encode_report(report))
        with phases.phase("finish") as notes:
            manifest = writer.finish(_manifest(options, target, opened, built, weights, hashes.result()))
            notes.append(f"{options.output}, {size_text(options.output.stat().st_size)}")
    phases.say(f"built in {phases.total():.2f} s, peak memory {size_text(peak_memory_bytes())}")
    return BuildResult(manifest, report, phases.seconds, peak_memory_bytes())


def _special_ids(opened: OpenedModel) -> set[int]:
    """Ids that golden prompts avoid."""
    config = opened.model.config
    ids = {*config.eos_token_ids, *(() if config.bos_token_id is None else (config.bos_token_id,))}
    if opened.tokenizer is not None:
        tokens = json.loads(opened.tokenizer.members["tokenizer/tokenizer_config.json"])["added_tokens"]
        ids |= {token["id"] for token in tokens}
    return ids


def _report(
    options: BuildOptions, target: Target, opened: OpenedModel, built: PlannedBuild, golden_level: str
) -> dict[str, Any]:
    parameters = built.parameters
    error = relative_error(opened.checkpoint, parameters) if options.weights == "file" else 0.0
    return make_report(
        built.passes,
        built.planned,
        built.layout,
        parameters,
        quantization_error=error,
        golden_level=golden_level,
        warnings=(*target.warnings, *opened.model.warnings),
        batch_invariant=options.batch_invariant,
        row_stable=target.is_row_stable or options.batch_invariant,
        tuning=built.tuning,
    )


def _manifest(
    options: BuildOptions,
    target: Target,
    opened: OpenedModel,
    built: PlannedBuild,
    weights: WeightsFile,
    source_files: dict[str, str],
) -> Manifest:
    schemes = scheme_sizes(built.parameters, built.layout)
    return make_manifest(
        model_info(
            opened.checkpoint, opened.model, opened.parameters, opened.tokenizer, opened.profile.max_seq_len
        ),
        target,
        opened.profile,
        QuantizationInfo(
            mode=options.quantize,
            compute=opened.compute,
            cache_dtype=target.cache_dtype(opened.compute),
            schemes={scheme: sizes["bytes"] for scheme, sizes in schemes.items()},
        ),
        (weights,),
        weights_source="dummy" if options.weights == "dummy" else "file",
        source_format=opened.checkpoint.source_format,
        source_files=source_files,
        row_stable=target.is_row_stable or options.batch_invariant,
        purpose=PURPOSE_SERVING if built.tuning is None else PURPOSE_TUNING,
    )


def _source_hashes(options: BuildOptions, checkpoint: Checkpoint) -> dict[str, str]:
    """sha256 of the checkpoint's files; "" where their weights aren't used."""
    if options.weights != "file":
        return dict.fromkeys(checkpoint.files, "")
    return checkpoint.hash_files()


def _graph_bytes(forward: Program) -> bytes:
    """The optimized graph as an .onnx file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.onnx"
        forward.save(path)
        return path.read_bytes()
