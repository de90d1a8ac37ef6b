"""Activations quantized to float8, and what linears make of them, against their definitions."""

import pytest
import torch

from castiron.models import fp8_ops
from castiron.models.fp8_ops import DTYPE
from castiron.models.ops import REFERENCES, SHAPE_RULES

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_dynamic_scales_put_each_tokens_largest_magnitude_at_448() -> None:
    x = random(5, 64) * torch.tensor([1e-6, 1.0, 3.0, 1e6, 0.0])[:, None]
    q, scale = fp8_ops.quantize_fp8(x, 0.0)
    assert q.dtype == DTYPE and q.shape == x.shape and scale.dtype == torch.float32
    assert torch.equal(scale[:4], x.abs().amax(1)[:4] / 448)
    assert scale[4] == torch.tensor(1e-12) and not q[4].float().any()
    assert torch.equal(q[:4].float().abs().amax(1), torch.full((4,), 448.0))
    error = (q.float() * scale[:, None] - x).abs()
    # half a step: 2^-4 of a value in its binade, or half the smallest subnormal 2^-9
    assert (error <= torch.maximum(x.abs() * 2**-4, scale[:, None] * 2**-10) * 1.0001).all()


def test_a_static_scale_is_every_tokens_and_saturates() -> None:
    x = torch.tensor([[500.0, -900.0, 1.0, 0.0], [448.0, 464.0, -0.0, 17.0]])
    q, scale = fp8_ops.quantize_fp8(x, 0.5)
    assert torch.equal(scale, torch.tensor([0.5, 0.5]))
    expected = torch.tensor(
        [[448.0, -448.0, 2.0, 0.0], [448.0, 448.0, 0.0, 32.0]]
    )  # 34 is between 32 and 36: to even
    assert torch.equal(q.float(), expected)


@pytest.mark.parametrize("input_scale", [0.0, 0.25])
def test_nan_stays_nan_and_stays_in_its_token(input_scale: float) -> None:
    x = random(3, 16)
    x[1, 5] = float("nan")
    q, _ = fp8_ops.quantize_fp8(x, input_scale)
    assert q[1, 5].float().isnan() and not q[[0, 2]].float().isnan().any()


@pytest.mark.parametrize("input_scale", [0.0, 0.02])
def test_linear_multiplies_what_the_codes_stand_for(input_scale: float) -> None:
    x, weight, bias = random(7, 48), random(10, 48, seed=1), random(10, seed=2)
    q, scale = fp8_ops.quantize_fp8(x, input_scale)
    expected = (q.double() * scale.double()[:, None]) @ weight.double().T
    assert torch.allclose(fp8_ops.linear_fp8(q, scale, weight).double(), expected, atol=1e-5)
    assert torch.allclose(fp8_ops.linear_fp8(q, scale, weight, bias).double(), expected + bias, atol=1e-5)


@pytest.mark.parametrize("input_scale", [0.0, 0.02])
def test_fused_ops_equal_their_parts(input_scale: float) -> None:
    x, residual, weight = random(5, 32), random(5, 32, seed=1), random(32, seed=2)

    def quantized(y: torch.Tensor) -> list[torch.Tensor]:
        return [t.float() for t in fp8_ops.quantize_fp8(y, input_scale)]

    cases = {
        "rms_norm": ((x, weight, 0.1), quantized(REFERENCES["rms_norm"](x, weight, 0.1))),
        "add_rms_norm": (
            (x, residual, weight, 0.1),
            [*quantized(REFERENCES["rms_norm"](x + residual, weight, 0.1)), x + residual],
        ),
        "silu_mul": ((x, residual), quantized(torch.nn.functional.silu(x) * residual)),
    }
    for name, (arguments, expected) in cases.items():
        for ours, wanted in zip(REFERENCES[f"{name}_fp8"](*arguments, input_scale), expected, strict=True):
            assert torch.equal(ours.float(), wanted), name


@pytest.mark.parametrize(
    "op", ["quantize_fp8", "linear_fp8", "rms_norm_fp8", "add_rms_norm_fp8", "silu_mul_fp8"]
)
def test_shape_rules_give_the_references_shapes_and_types(op: str) -> None:
    x = random(6, 32)
    q, scale = fp8_ops.quantize_fp8(x, 0.0)
    arguments = {
        "quantize_fp8": (x, 0.0),
        "linear_fp8": (q, scale, random(9, 32), random(9)),
        "rms_norm_fp8": (x, random(32), 0.1, 0.0),
        "add_rms_norm_fp8": (x, x, random(32), 0.1, 0.0),
        "silu_mul_fp8": (x, x, 0.0),
    }[op]
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    stated, made = SHAPE_RULES[op](*meta), REFERENCES[op](*arguments)
    pairs = [(stated, made)] if isinstance(made, torch.Tensor) else list(zip(stated, made, strict=True))
    assert [(s.shape, s.dtype) for s, _ in pairs] == [(m.shape, m.dtype) for _, m in pairs]


def test_arguments_that_do_not_fit_are_refused() -> None:
    q, scale = fp8_ops.quantize_fp8(random(6, 32), 0.0)
    weight = random(9, 32)
    for arguments, message in (
        ((q.float(), scale, weight), "q is torch.float32"),
        ((q, scale[:5], weight), "scales"),
        ((q, scale, weight[:, :31]), "32 columns, weight has 31"),
    ):
        with pytest.raises(AssertionError, match=message):
            SHAPE_RULES["linear_fp8"](*arguments)
