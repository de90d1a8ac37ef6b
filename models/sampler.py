"""The sampling graphs: one op each, from logits and step fields to sampled ids and log probabilities."""

from torch import Tensor, nn

from castiron.models import sampling_ops as ops


class Sampler(nn.Module):
    """forward(logits f32[L, V], last_token i32[R], step fields by name) -> tensors named OUTPUTS."""

    OUTPUTS = ("sampled_token_ids", "sampled_logprobs", "top_token_ids", "top_logprobs", "last_token_out")


class GreedySampler(Sampler):
    FIELDS = ("sample_rows", "num_logprobs")

    def forward(self, logits: Tensor, last_token: Tensor, step: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return ops.sample_greedy(logits, step["sample_rows"], step["num_logprobs"], last_token)


class RandomSampler(Sampler):
    FIELDS = (
        "sample_rows",
        "num_logprobs",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "output_position",
    )

    def forward(self, logits: Tensor, last_token: Tensor, step: dict[str, Tensor]) -> tuple[Tensor, ...]:
        choice = (step[name] for name in self.FIELDS[2:])
        return ops.sample_random(logits, step["sample_rows"], step["num_logprobs"], last_token, *choice)


# variant -> module, step fields it reads
SAMPLERS: dict[str, tuple[type[Sampler], tuple[str, ...]]] = {
    "greedy": (GreedySampler, GreedySampler.FIELDS),
    "random": (RandomSampler, RandomSampler.FIELDS),
}
