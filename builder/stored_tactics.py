"""The measured times a build chooses kernels by: those that ship with castiron, a file's, or none."""

from castiron.builder.options import BuildOptions
from castiron.builder.plan.tactics import StoredTactics
from castiron.builder.targets import Target
from castiron.configs.tuning_results import check_target, read_results, stored_results
from castiron.plugins_cuda.source_hash import compiler_version
from castiron.runtime.errors import WorkFailedError

NONE = "none"  # of --tactics: the cost model alone


def stored_tactics(options: BuildOptions, target: Target) -> StoredTactics | None:
    """None where there are no times. Raises InputError for a damaged file, WorkFailedError without a compiler."""
    if target.kind != "cuda" or options.tactics == NONE:
        return None
    if options.tactics is None:
        files = stored_results(target.name)
    else:
        files = [read_results(options.tactics)]
        check_target(files[0], target.name, options.tactics)
    return StoredTactics(files, target.level, _compiler(options)) if files else None


def _compiler(options: BuildOptions) -> str:
    """Of a dry run without one: "", which no times are of."""
    try:
        return compiler_version()
    except WorkFailedError:
        if options.dry_run:
            return ""
        raise
