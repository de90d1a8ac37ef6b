"""Which plans a step runs: the smallest forward bucket that holds it, and that bucket's sampling variant."""

from castiron.runtime.engine_options import ServingLimits
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.plan_format import Plan, PlanHeader

GREEDY, RANDOM, FULL = "greedy", "random", "full"


class PlanTable:
    """The plans of one engine by what they hold."""

    def __init__(self, header: PlanHeader, limits: ServingLimits) -> None:
        """Raises EngineFormatError if the plans can't hold the largest step or can't be sampled."""
        forwards = [(index, plan) for index, plan in enumerate(header.plans) if plan.kind == "forward"]
        self._forwards = sorted(forwards, key=lambda item: _size(item[1]))
        self._samples: dict[tuple[int, str], int] = {}
        for forward_index, forward in forwards:
            for index, plan in enumerate(header.plans):
                if plan.kind == "sample" and (plan.bucket, plan.ladder) == (forward.bucket, forward.ladder):
                    variant = plan.name.removeprefix("sample.").partition(".")[0]  # "sample.greedy.decode"
                    self._samples[forward_index, variant] = index
        if header.max_rows < limits.max_seqs:
            raise EngineFormatError(
                f"the plan has {header.max_rows} rows, max_seqs is {limits.max_seqs}: rebuild the engine"
            )
        largest = (limits.max_batched_tokens, limits.max_seqs, limits.max_seqs, limits.max_batched_tokens)
        if self._find(*largest) is None:
            raise EngineFormatError(
                f"no forward plan holds a step of {limits.max_batched_tokens} tokens and {limits.max_seqs} "
                f"sequences: rebuild the engine"
            )
        for index, plan in forwards:
            if (index, GREEDY) not in self._samples:
                raise EngineFormatError(f"plan {plan.name} has no greedy sampling plan: rebuild the engine")
        self.max_logits = max(plan.bucket.max_logits for _, plan in forwards)

    @property
    def variants(self) -> tuple[str, ...]:
        """Sampling variants that every bucket has."""
        buckets = [index for index, _ in self._forwards]
        names = sorted({variant for _, variant in self._samples})
        return tuple(name for name in names if all((index, name) in self._samples for index in buckets))

    def choose_forward(self, num_tokens: int, num_seqs: int, num_logits: int, max_query_len: int) -> int:
        """Index of the smallest forward plan that holds such a step."""
        index = self._find(num_tokens, num_seqs, num_logits, max_query_len)
        assert index is not None, (num_tokens, num_seqs, num_logits, max_query_len)
        return index

    def sample_of(self, forward_index: int, variant: str) -> int:
        """Index of the sampling plan of that forward plan's bucket."""
        return self._samples[forward_index, variant]

    def _find(self, num_tokens: int, num_seqs: int, num_logits: int, max_query_len: int) -> int | None:
        for index, plan in self._forwards:
            bucket = plan.bucket
            if (
                num_tokens <= bucket.max_tokens
                and num_seqs <= bucket.max_seqs
                and num_logits <= bucket.max_logits
                and max_query_len <= bucket.max_query_len
            ):
                return index
        return None


def _size(plan: Plan) -> tuple[int, int, int, int]:
    bucket = plan.bucket
    return bucket.max_tokens, bucket.max_seqs, bucket.max_logits, bucket.max_query_len
