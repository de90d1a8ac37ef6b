"""Each ingredient of a model, broken on purpose, must exceed the bound of test_against_transformers tenfold.

A test that can't see a dropped norm weight or a wrong rope base proves nothing when it passes.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import onnx_ir as ir
import pytest
import torch
from paged_steps import make_tokens, run_in_chunks, trace_checkpoint
from tiny_checkpoints import load_reference, reference_logits, save_tiny_checkpoint

from castiron.builder import graph as g
from castiron.builder.graph import Program
from castiron.builder.parameters import Parameter
from castiron.models import ops

torch.set_num_threads(1)
BOUND = 1e-4
TENFOLD = 10 * BOUND
TOKENS = make_tokens(64)

Loader = Callable[[Parameter], torch.Tensor]
Patch = pytest.MonkeyPatch


def _set_attribute(program: Program, op: str, name: str, change: Callable[[float], float]) -> None:
    for node in program.graph:
        if g.is_op(node, op):
            node.attributes[name] = ir.AttrFloat32(name, change(g.float_attribute(node, name)))


def _with(
    load: Loader, matches: Callable[[str], bool], change: Callable[[torch.Tensor], torch.Tensor]
) -> Loader:
    return lambda parameter: change(load(parameter)) if matches(parameter.name) else load(parameter)


def wrong_eps(program: Program, load: Loader, patch: Patch) -> Loader:
    _set_attribute(program, "rms_norm", "eps", lambda eps: 1e-5)
    return load


def wrong_attention_scale(program: Program, load: Loader, patch: Patch) -> Loader:
    _set_attribute(program, "paged_attention", "scale", lambda scale: scale * 1.1)
    return load


def norm_weight_dropped(program: Program, load: Loader, patch: Patch) -> Loader:
    return _with(load, lambda name: name == "layers.1.mlp_norm.weight", torch.ones_like)


def norm_weight_off_by_one(program: Program, load: Loader, patch: Patch) -> Loader:
    return _with(load, lambda name: name == "final_norm.weight", lambda w: w + 1)


def rope_base_wrong(program: Program, load: Loader, patch: Patch) -> Loader:
    return _with(load, lambda name: name == "inv_freq", lambda f: f[0] * (f / f[0]) ** 1.05)


def rope_pairs_adjacent(program: Program, load: Loader, patch: Patch) -> Loader:
    def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x[..., 0::2], x[..., 1::2]
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

    patch.setitem(ops.REFERENCES, "apply_rope", apply_rope)
    return load


def rope_turned_backwards(program: Program, load: Loader, patch: Patch) -> Loader:
    right = ops.REFERENCES["apply_rope"]
    patch.setitem(
        ops.REFERENCES,
        "apply_rope",
        lambda x, cos, sin: right(x, cos, -sin) if x.shape[1] == 4 else right(x, cos, sin),
    )
    return load


def kv_heads_mapped_modulo(program: Program, load: Loader, patch: Patch) -> Loader:
    right = ops.REFERENCES["paged_attention"]

    def attention(q: torch.Tensor, cache: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        heads, kv_heads = q.shape[1], cache.shape[2]
        # head h reads kv head h % kv_heads instead of h // (heads / kv_heads)
        order = torch.arange(heads).reshape(-1, kv_heads).T.reshape(-1)
        result = torch.empty_like(q)
        result[:, order] = right(q[:, order], cache, *rest, **named)
        return result

    patch.setitem(ops.REFERENCES, "paged_attention", attention)
    return load


def causal_mask_off(program: Program, load: Loader, patch: Patch) -> Loader:
    right = ops.REFERENCES["paged_attention"]

    def attention(
        q: torch.Tensor,
        cache: torch.Tensor,
        tables: torch.Tensor,
        lens: torch.Tensor,
        starts: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        # every token as the last of its sequence
        rows = [
            right(q[j : j + 1], cache, tables[i : i + 1], lens[i : i + 1], torch.tensor([0, 1]), scale)
            for i in range(len(lens))
            for j in range(int(starts[i]), int(starts[i + 1]))
        ]
        return torch.cat(rows)

    patch.setitem(ops.REFERENCES, "paged_attention", attention)
    return load


def bias_dropped(program: Program, load: Loader, patch: Patch) -> Loader:
    return _with(load, lambda name: name == "layers.2.k.bias", torch.zeros_like)


def down_bias_dropped(program: Program, load: Loader, patch: Patch) -> Loader:
    return _with(load, lambda name: name == "layers.0.down.bias", torch.zeros_like)


def silu_as_gelu(program: Program, load: Loader, patch: Patch) -> Loader:
    patch.setitem(ops.REFERENCES, "silu", torch.nn.functional.gelu)
    return load


def gate_and_up_swapped(program: Program, load: Loader, patch: Patch) -> Loader:
    swapped = {"layers.0.gate.weight": "layers.0.up.weight", "layers.0.up.weight": "layers.0.gate.weight"}
    return lambda p: load(program.parameters[swapped.get(p.name, p.name)])


def tie_broken(program: Program, load: Loader, patch: Patch) -> Loader:
    """lm_head takes the embedding of a model that doesn't tie them."""
    return lambda p: load(program.parameters["embedding.weight" if p.name == "lm_head.weight" else p.name])


def residual_dropped(program: Program, load: Loader, patch: Patch) -> Loader:
    add = next(node for node in program.graph if g.is_op(node, "Add"))
    add.outputs[0].replace_all_uses_with(g.input_of(add, 1))
    return load


def positions_off_by_one_in_the_cache(program: Program, load: Loader, patch: Patch) -> Loader:
    right = ops.REFERENCES["kv_write"]
    patch.setitem(ops.REFERENCES, "kv_write", lambda cache, k, v, slots: right(cache, k, v, slots ^ 1))
    return load


def rope_scaling_dropped(program: Program, load: Loader, patch: Patch) -> Loader:
    return _with(load, lambda n: n == "inv_freq", lambda f: 10000.0 ** (-torch.arange(len(f)) / len(f)))


BIASED = {"attention_bias": True, "mlp_bias": True}
MISTAKES: list[tuple[Callable[[Program, Loader, Patch], Loader], dict[str, Any]]] = [
    (wrong_eps, {}),
    (wrong_attention_scale, {}),
    (norm_weight_dropped, {}),
    (norm_weight_off_by_one, {}),
    (rope_base_wrong, {}),
    (rope_pairs_adjacent, {}),
    (rope_turned_backwards, {}),
    (rope_scaling_dropped, {"rope": "llama3", "rope_theta": 10000.0}),
    (rope_scaling_dropped, {"rope": "yarn", "rope_theta": 10000.0}),
    (kv_heads_mapped_modulo, {}),
    (causal_mask_off, {}),
    (positions_off_by_one_in_the_cache, {}),
    (bias_dropped, BIASED),
    (down_bias_dropped, BIASED),
    (bias_dropped, {"architecture": "qwen2"}),
    (silu_as_gelu, {}),
    (gate_and_up_swapped, {}),
    (tie_broken, {}),
    (residual_dropped, {}),
]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Options as text -> program, loader and expected logits; tracing is the slow part, so each is kept."""

    @cache
    def make(options: str) -> tuple[Program, Loader, torch.Tensor]:
        folder = save_tiny_checkpoint(
            tmp_path_factory.mktemp("tiny"), with_tokenizer=False, **json.loads(options)
        )
        program, _, load = trace_checkpoint(folder)
        return program, load, reference_logits(load_reference(folder), TOKENS)

    return make


@pytest.mark.parametrize(
    ("mistake", "options"),
    MISTAKES,
    ids=[f"{m.__name__}-{'-'.join(map(str, o.values()))}" for m, o in MISTAKES],
)
def test_a_mistake_exceeds_the_bound_tenfold(
    mistake: Callable[[Program, Loader, Patch], Loader],
    options: dict[str, Any],
    traced: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, load, expected = traced(json.dumps(options))
    (right,) = run_in_chunks(program, load, [TOKENS], chunk=64)
    assert (right - expected).abs().max() <= BOUND
    broken = replace(program, model=program.model.clone())
    broken_load = mistake(broken, load, monkeypatch)
    (wrong,) = run_in_chunks(broken, broken_load, [TOKENS], chunk=64)
    assert (wrong - expected).abs().max() >= TENFOLD
