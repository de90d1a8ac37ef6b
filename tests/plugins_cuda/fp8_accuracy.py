"""How exact FP8 sums are, beside torch._scaled_mm: python fp8_accuracy.py.

The tensor cores of sm_90 add products of float8 with fewer bits than float32 has. "fast" leaves all sums there, as
our kernels do; "not fast" moves them to other registers on the way. Printed: ‖y - exact‖ / ‖exact‖ of y in
bfloat16, whose own rounding is 1.7e-3, and the mean error over the mean |exact|, which shows a bias; exact are
float64 sums of the codes. Same-sign data (no negative code) is the worst case: sums grow, and what is cut off is
always cut off alike.
"""

import torch
from test_linear_fp8 import SPECS, Case

from castiron.models.fp8_ops import DTYPE
from castiron.plugins_cuda.layouts import tiles_bytes

TOKENS, N = 128, 256
KERNEL = "linear_many.fp8.256x128"


def positive(case: Case) -> Case:
    """The same case without signs."""
    n, k = case.codes.shape
    packed = case.packed.clone()
    packed[: tiles_bytes("fp8", n, k)] &= 0x7F
    return Case(case.live, case.q & 0x7F, case.scale, packed, case.codes.abs(), case.row_scale, None)


def torch_sums(case: Case, fast: bool) -> torch.Tensor:
    """What torch makes of the case's codes, the scales applied afterwards."""
    one = torch.ones((), device="cuda")
    q, codes = case.q.contiguous().view(DTYPE), case.codes.to(DTYPE)
    y = torch._scaled_mm(q, codes.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return y.double() * case.scale[:, None].double() * case.row_scale


def main() -> None:
    print(
        f"{'data':12}{'k':>7}  {'sums':12}{'error':>10}{'bias':>12}   ({KERNEL}, {TOKENS} tokens, {N} rows)"
    )
    for data in ("normal", "same sign"):
        for k in (4096, 14336):
            case = Case.random(TOKENS, TOKENS, N, k, bias=False)
            case = positive(case) if data == "same sign" else case
            x = case.q.view(DTYPE).double() * case.scale[:, None].double()
            exact = x @ (case.codes * case.row_scale[:, None]).T
            results = {"ours": case.run(SPECS[KERNEL])}
            results |= {"torch fast": torch_sums(case, True), "not fast": torch_sums(case, False)}
            for label, y in results.items():
                error = y.double() - exact
                share = float(error.norm() / exact.norm())
                bias = float(error.mean() / exact.abs().mean())
                print(f"{data:12}{k:7}  {label:12}{share:10.2e}{bias:12.2e}", flush=True)


if __name__ == "__main__":
    main()
