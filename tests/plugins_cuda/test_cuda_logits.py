"""mask_logits, adjust_logits, sample_full and count_tokens of the GPU against their references."""

from typing import Any

import numpy as np
import pytest
import torch
from sampling_steps import BIASES, CHOICE, PENALTIES, ROWS, Step

from castiron.models.ops import REFERENCES
from castiron.plugins_cuda.specs import SPECS
from castiron.runtime.step_abi import MAX_LOGPROBS

pytest.importorskip("cuda.bindings", reason="kernels are launched through cuda-bindings")
from cuda_kernel_caller import NUM_LOGITS, call, poisoned

pytestmark = pytest.mark.gpu

VOCABS = (1, 31, 33, 1003, 2048, 2049, 4100, 128256)
CAPACITY = {"max_logits": ROWS + 1}


def on_gpu(step: Step, *names: str) -> dict[str, torch.Tensor]:
    signed = {np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}  # torch copies these bit for bit
    fields = {name: step.fields[name] for name in names}
    return {
        name: torch.from_numpy(v.view(signed.get(v.dtype, v.dtype)).copy()).cuda()
        for name, v in fields.items()
    }


def strided(values: np.ndarray, pad: int) -> torch.Tensor:
    return torch.from_numpy(np.pad(values, ((0, 0), (0, pad)), constant_values=np.nan)).cuda()


def run_elementwise(name: str, step: Step, *names: str) -> np.ndarray:
    y = poisoned(ROWS + 1, step.vocab + 2, dtype=torch.float32)
    call(
        SPECS[name], num_logits=ROWS, capacities=CAPACITY, late=("logits",), logits=strided(step.fields["logits"], 3),
        logits_stride=step.vocab + 3, y=y, y_stride=step.vocab + 2, count=NUM_LOGITS, vocab=step.vocab,
        **on_gpu(step, *names),
    )  # fmt: skip
    bits = y.view(torch.int32)
    assert (bits[ROWS:] == -1).all() and (bits[:, step.vocab :] == -1).all()
    result: np.ndarray = y[:ROWS, : step.vocab].cpu().numpy()
    return result


@pytest.mark.sanitize
@pytest.mark.parametrize("vocab", VOCABS)
def test_masks_ban_what_has_no_bit(vocab: int) -> None:
    step = Step(vocab, seed=vocab)
    expected = REFERENCES["mask_logits"](*step.live("logits", "mask_rows", "grammar_masks"))
    y = run_elementwise("mask_logits", step, "mask_rows", "grammar_masks")
    np.testing.assert_array_equal(y, expected.numpy())


@pytest.mark.sanitize
@pytest.mark.parametrize("vocab", VOCABS)
def test_allowed_ids_biases_and_penalties_are_the_references(vocab: int) -> None:
    step = Step(vocab, seed=vocab)
    names = ("sample_rows", "token_counts", *PENALTIES, *BIASES)
    expected = REFERENCES["adjust_logits"](*step.live("logits", *names))
    np.testing.assert_array_equal(run_elementwise("adjust_logits", step, *names), expected.numpy())


def sample_full(
    variant: str, step: Step, adjusted: np.ndarray, late: tuple[str, ...] = ("logits", "adjusted")
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Results of the live rows by name, and last_token."""
    found: dict[str, Any] = {
        "sampled_token_ids": poisoned(ROWS + 1, dtype=torch.int32),
        "sampled_logprobs": poisoned(ROWS + 1, dtype=torch.float32),
        "sampled_ranks": poisoned(ROWS + 1, dtype=torch.int32),
        "top_token_ids": poisoned(ROWS + 1, MAX_LOGPROBS, dtype=torch.int32),
        "top_logprobs": poisoned(ROWS + 1, MAX_LOGPROBS, dtype=torch.float32),
    }
    fields = on_gpu(step, "sample_rows", "num_logprobs", "last_token", *CHOICE)
    call(
        SPECS[f"sample_full{variant}"], num_logits=ROWS, capacities=CAPACITY, late=late,
        logits=strided(step.fields["logits"], 3), logits_stride=step.vocab + 3, adjusted=strided(adjusted, 1),
        adjusted_stride=step.vocab + 1, count=NUM_LOGITS, vocab=step.vocab, **fields, **found,
    )  # fmt: skip
    for name, values in found.items():
        assert (values[ROWS:].view(torch.int32) == -1).all(), f"{name}: wrote beyond the live rows"
    return {name: v[:ROWS].cpu().numpy() for name, v in found.items()}, fields["last_token"].cpu().numpy()


@pytest.mark.parametrize("variant", ["", ".cta"], ids=["cluster", "cta"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_full_sampling_is_the_reference(vocab: int, variant: str) -> None:
    step = Step(vocab, seed=7 * vocab)
    adjusted = np.random.default_rng(vocab).normal(0, 2, (ROWS + 1, vocab)).astype(np.float32)
    adjusted[4] = -np.inf  # all banned: the lowest id
    names = ("sample_rows", "num_logprobs", "last_token", *CHOICE)
    expected = REFERENCES["sample_full"](
        step.live("logits")[0], torch.from_numpy(adjusted[:ROWS].copy()), *step.live(*names)
    )
    found, last_token = sample_full(variant, step, adjusted)
    for (name, value), wanted in zip(found.items(), expected, strict=False):
        if "logprobs" in name:
            np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-6, atol=2e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(value, wanted.numpy(), err_msg=name)
    np.testing.assert_array_equal(last_token, expected[5].numpy())
    again, _ = sample_full(variant, step, adjusted, late=())
    for name, value in found.items():
        np.testing.assert_array_equal(again[name].view(np.int32), value.view(np.int32), err_msg=name)


@pytest.mark.sanitize
@pytest.mark.parametrize("variant", ["", ".cta"], ids=["cluster", "cta"])
def test_the_smallest_launches_of_full_sampling_are_the_reference(variant: str) -> None:
    test_full_sampling_is_the_reference(33, variant)


@pytest.mark.sanitize
def test_rows_with_penalties_count_their_tokens() -> None:
    step = Step(200)
    step.fields["sampled_token_ids"] = np.array([7, 7, 0, 199, 3, 1 << 30], np.int32)
    names = ("token_counts", "sampled_token_ids", "sample_rows", *PENALTIES)
    expected = REFERENCES["count_tokens"](*step.live(*names))
    fields = on_gpu(step, *names)
    call(
        SPECS["count_tokens"], num_logits=ROWS, capacities=CAPACITY, late=("sampled_token_ids",), count=NUM_LOGITS,
        vocab=200, **fields,
    )  # fmt: skip
    np.testing.assert_array_equal(fields["token_counts"].cpu().numpy().view(np.uint32), expected.numpy())


def test_draws_follow_the_adjusted_distribution() -> None:
    """Chi-square over 20,000 rows with everything on; 38 is passed with p > 1e-4 up to 11 degrees of freedom."""
    rng = np.random.default_rng(9)
    vocab, draws, temperature = 12, 20_000, 0.8
    logits = (rng.standard_normal(vocab) * 1.2).astype(np.float32)
    rows = torch.from_numpy(np.tile(logits, (draws, 1))).cuda()
    arrays = {
        "sample_rows": (np.int32, -1), "num_logprobs": (np.int32, -1), "temperature": (np.float32, temperature),
        "top_k": (np.int32, 8), "top_p": (np.float32, 0.9), "min_p": (np.float32, 0.02),
        "output_position": (np.int32, 0),
    }  # fmt: skip
    fields = {
        name: torch.from_numpy(np.full(draws, value, dtype)).cuda() for name, (dtype, value) in arrays.items()
    }
    token_ids = poisoned(draws, dtype=torch.int32)
    outputs = {
        "sampled_logprobs": poisoned(draws, dtype=torch.float32), "sampled_ranks": poisoned(draws, dtype=torch.int32),
        "top_token_ids": poisoned(draws, MAX_LOGPROBS, dtype=torch.int32),
        "top_logprobs": poisoned(draws, MAX_LOGPROBS, dtype=torch.float32),
    }  # fmt: skip
    call(
        SPECS["sample_full"], num_logits=draws, capacities={"max_logits": draws}, logits=rows, logits_stride=vocab,
        adjusted=rows, adjusted_stride=vocab, last_token=torch.zeros(4, dtype=torch.int32, device="cuda"),
        seed=torch.arange(draws, dtype=torch.int64, device="cuda"), sampled_token_ids=token_ids, count=NUM_LOGITS,
        vocab=vocab, **fields, **outputs,
    )  # fmt: skip
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    order = [i for i in np.argsort(-scaled) if scaled[i] >= np.log(0.02)][:8]
    mass = np.exp(scaled[order])
    kept = order[: int(np.argmax(np.cumsum(mass) >= 0.9 * mass.sum())) + 1]
    probabilities = np.exp(scaled[kept])
    expected = draws * probabilities / probabilities.sum()
    counts = np.bincount(token_ids.cpu().numpy(), minlength=vocab)
    assert counts.sum() == counts[kept].sum(), "a filtered token was sampled"
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 38.0
