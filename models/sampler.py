"""The sampling graphs, from logits and step fields to sampled ids and log probabilities."""

from torch import Tensor, nn

from castiron.models import logit_ops
from castiron.models import sampling_ops as ops


class Sampler(nn.Module):
    """forward(logits f32[L, V], rows' state by name, step fields by name) -> tensors named outputs(), states last."""

    FIELDS: tuple[str, ...]  # of the step that it reads
    STATES: tuple[str, ...] = ("last_token",)  # of the rows that it reads and writes
    RESULTS: tuple[str, ...] = ("sampled_token_ids", "sampled_logprobs", "top_token_ids", "top_logprobs")

    @classmethod
    def outputs(cls) -> tuple[str, ...]:
        return (*cls.RESULTS, *(f"{name}_out" for name in cls.STATES))


class GreedySampler(Sampler):
    FIELDS = ("sample_rows", "num_logprobs")

    def forward(self, logits: Tensor, rows: dict[str, Tensor], step: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return ops.sample_greedy(logits, step["sample_rows"], step["num_logprobs"], rows["last_token"])


_CHOICE = ("temperature", "top_k", "top_p", "min_p", "seed", "output_position")


class RandomSampler(Sampler):
    FIELDS = ("sample_rows", "num_logprobs", *_CHOICE)

    def forward(self, logits: Tensor, rows: dict[str, Tensor], step: dict[str, Tensor]) -> tuple[Tensor, ...]:
        choice = (step[name] for name in _CHOICE)
        return ops.sample_random(
            logits, step["sample_rows"], step["num_logprobs"], rows["last_token"], *choice
        )


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_BIASES = ("bias_starts", "bias_token_ids", "bias_values", "allowed_rows", "allowed_masks")


class FullSampler(Sampler):
    """Everything a request may ask for; rows that ask for nothing get what the other samplers give them."""

    FIELDS = ("sample_rows", "num_logprobs", *_CHOICE, *_PENALTIES, *_BIASES, "mask_rows", "grammar_masks")
    STATES = ("last_token", "token_counts")
    RESULTS = ("sampled_token_ids", "sampled_logprobs", "sampled_ranks", "top_token_ids", "top_logprobs")

    def forward(self, logits: Tensor, rows: dict[str, Tensor], step: dict[str, Tensor]) -> tuple[Tensor, ...]:
        choice, penalties, biases = (
            [step[name] for name in names] for names in (_CHOICE, _PENALTIES, _BIASES)
        )
        sample_rows, counts = step["sample_rows"], rows["token_counts"]
        masked = logit_ops.mask_logits(logits, step["mask_rows"], step["grammar_masks"])
        adjusted = logit_ops.adjust_logits(masked, sample_rows, counts, *penalties, *biases)
        *results, last_token = ops.sample_full(
            masked, adjusted, sample_rows, step["num_logprobs"], rows["last_token"], *choice
        )
        counts = logit_ops.count_tokens(counts, results[0], sample_rows, *penalties)
        return (*results, last_token, counts)


SAMPLERS: dict[str, type[Sampler]] = {"greedy": GreedySampler, "random": RandomSampler, "full": FullSampler}
