"""What runtimes work out of factors when they load: under the runtime's own names, with `--for`.

g: global scales of weights as factors; a: those of activations. w13's g may be [E, 2], gate and up.
Sources: vllm-project/vllm 0.33.0, vllm/model_executor/layers/fused_moe/oracle/nvfp4.py and vllm/
model_executor/kernels/linear/nvfp4; sgl-project/sglang 0.5.23, python/sglang/srt/layers/
quantization/modelopt_quant.py.
"""

from __future__ import annotations

from torch import Tensor

from transcode.spec import Factors, Scalar


def _gate(f: Factors) -> Tensor:
    return (f.g[:, 0] if f.g.dim() == 2 else f.g) * f.a


def _up(f: Factors) -> Tensor:
    return (f.g[:, -1] if f.g.dim() == 2 else f.g) * f.a


def _next(f: Factors) -> Tensor:
    assert f.a2 is not None
    return _up(f) * (1.0 / f.a2)


EXPERTS = (
    Scalar("a1_gscale", "w13", lambda f: 1.0 / f.a),
    Scalar("g1_alphas", "w13", _gate),
    Scalar("a2_gscale", "w2", lambda f: 1.0 / f.a),
    Scalar("g2_alphas", "w2", lambda f: f.g * f.a),
)
"""Of both grouped GEMMs: what activations are divided by, and what products are multiplied with."""

CUTLASS = (
    Scalar("alpha", "", lambda f: f.g * f.a),
    Scalar("input_global_scale_inv", "", lambda f: 1.0 / f.a),
    *EXPERTS,
)
TRTLLM = (*EXPERTS, Scalar("g1_scale_c", "w13", _next))
"""The factor of up's half goes into the scale that the second GEMM's activations get."""

SGLANG = (*TRTLLM, Scalar("g1_alphas_up", "w13", _up))

MEGAMOE = (
    Scalar("mega_l1_alphas", "w13", lambda f: f.g, each=True),
    Scalar("mega_l2_act_scales", "w2", lambda f: 1.0 / f.a),
    Scalar("mega_l2_alphas", "w2", lambda f: f.g * f.a),
)
"""sgl-deep-gemm's: the first GEMM's activations have a scale for each token."""
