"""Small quantised checkpoints as their producers write them, and the truth about their weights.

An independent hand: nothing comes from `transcode`. Draws are seeded by `Spec.seed` and the module
name alone, so specs that differ in dialect, shards or ratios hold the same codes and block scales.
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save
from torch import Generator, Tensor

Encoding = Literal["nvfp4", "bf16", "fp8", "fp8_channel", "fp8_block", "mxfp4", "int4"]
ModelType = Literal[
    "qwen3_moe", "llama", "mixtral", "deepseek_v3", "nemotron_h", "qwen3_next", "minimax_m2",
    "deepseek_v4",
]  # fmt: skip
Tensors = dict[str, Tensor]
Json = dict[str, Any]
VOCAB = 272
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Spec:
    """A checkpoint to build; widths are multiples of 16, and of 32 along mxfp4 and int4 columns.

    nemotron_h has one Mamba layer, then `layers` pairs of an attention and an MLP layer; qwen3_next
    only full attention. deepseek_v4 is NVIDIA's repack: attention and shared experts are always
    fp8_block, the MTP's experts mxfp4, and there are no KV scales.
    """

    dialect: Literal["modelopt", "compressed-tensors"] = "modelopt"
    model_type: ModelType = "qwen3_moe"
    hidden: int = 256
    intermediate: int = 96
    experts: int = 4  # 0 = dense, as llama always is
    layers: int = 2
    seed: int = 0
    gated: bool = True  # False: no gate_proj, as in nemotron_h always
    w4a16: bool = False  # NVFP4 without input scales
    shared_experts: int = 0
    mtp_layers: int = 0
    mtp: Encoding = "bf16"  # all of the MTP layers
    attention: Encoding = "nvfp4"
    gate_up: Encoding = "nvfp4"
    down: Encoding = "nvfp4"  # of routed experts or of a dense MLP
    shared: Encoding = "nvfp4"  # of shared experts
    biases: bool = False  # of q, k, v
    expert_biases: bool = False  # of every MLP
    kv_scales: bool = False
    shards: int = 1
    head_dim: int = 32
    heads: int = 4
    kv_heads: int = 2
    config_dtype: Literal["bfloat16", "float16"] = "bfloat16"  # of "bf16" tensors too
    gate_up_ratio: float | tuple[float, ...] | None = None  # on up's factor; a tuple: per expert
    qkv_ratio: float | tuple[float, float] | None = None  # on k's and v's factor; a tuple: (k, v)
    tiny_scales: bool = False  # one E4M3 block scale in 64 is subnormal (below 2^-6)

    @property
    def ct(self) -> bool:
        return self.dialect == "compressed-tensors"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.config_dtype == "float16" else torch.bfloat16

    def shape(self, text: str) -> list[int]:
        """What a table's "A,H" means: H hidden, A all query heads, C all key heads, D one head."""
        h, n, d, c = self.hidden, self.heads, self.head_dim, self.kv_heads * self.head_dim
        size = {"H": h, "2H": 2 * h, "A": n * d, "2A": 2 * n * d, "C": c, "D": d, "N": n}
        size |= {"Q": 64, "K": 32, "KR": 48, "AR": n * (d + 16)}  # DeepSeek's ranks
        size |= {"M": 3 * n * d + n, "E": self.experts, "V": VOCAB}
        return [size[x] if x in size else int(x) for x in text.rstrip("!").split(",")]


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps its modules. Tables: `name shape; ...`, "!" = float32."""

    cls: str
    count: str = "n_routed_experts"
    at: str = "model.layers.{}."
    attention: str = "self_attn."
    ffn: str = "mlp."
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts."
    linears: str = "q_proj A,H q; k_proj C,H k; v_proj C,H v; o_proj H,A"  # q k v: one fused group
    beside: str = ""  # plain tensors beside these
    router: str = "gate.weight E,H"
    norms: str = "input_layernorm.weight H; post_attention_layernorm.weight H"
    model: str = "model.embed_tokens.weight V,H; model.norm.weight H; lm_head.weight V,H"
    mtp_at: str = "mtp.layers.{}."
    mtp: str = (
        "mtp.fc.weight H,2H; mtp.norm.weight H; "
        "mtp.pre_fc_norm_embedding.weight H; mtp.pre_fc_norm_hidden.weight H"
    )
    config: Json = field(default_factory=dict)


LOCAL, W = "num_local_experts", ("w1", "w3", "w2")
QK_NORM, BIAS = "q_norm.weight D; k_norm.weight D", "gate.e_score_correction_bias E!"
EH = "{0}eh_proj.weight H,2H; {0}enorm.weight H; {0}hnorm.weight H; "
# fmt: off
FAMILIES = {
    "llama": Family("Llama", count=""),
    "qwen3_moe": Family("Qwen3Moe", LOCAL, beside=QK_NORM),
    "qwen3_next": Family(
        "Qwen3Next", "num_experts", shared="shared_expert.", beside=QK_NORM,
        linears="q_proj 2A,H q; k_proj C,H k; v_proj C,H v; o_proj H,A",
        router="gate.weight E,H; shared_expert_gate.weight 1,H"),
    "mixtral": Family("Mixtral", LOCAL, ffn="block_sparse_moe.", gate_up_down=W),
    "minimax_m2": Family(
        "MiniMaxM2", LOCAL, ffn="block_sparse_moe.", gate_up_down=W,
        beside="q_norm.weight A; k_norm.weight C",
        router="gate.weight E,H; e_score_correction_bias E!"),
    "deepseek_v3": Family(
        "DeepseekV3", beside="q_a_layernorm.weight Q; kv_a_layernorm.weight K",
        linears="q_a_proj Q,H q; q_b_proj AR,Q; kv_a_proj_with_mqa KR,H k; kv_b_proj 2A,K; "
                "o_proj H,A",
        router="gate.weight E,H; " + BIAS, mtp_at="model.layers.{}.",
        mtp=EH + "{0}embed_tokens.weight V,H; {0}shared_head.norm.weight H; "
                 "{0}shared_head.head.weight V,H",
        config={"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
                "first_k_dense_replace": 0}),
    "nemotron_h": Family(
        "NemotronH", at="backbone.layers.{}.", attention="mixer.", ffn="mixer.",
        router="gate.weight E,H; " + BIAS, norms="norm.weight H",
        model="backbone.embeddings.weight V,H; backbone.norm_f.weight H; lm_head.weight V,H; "
              "backbone.layers.0.norm.weight H; {0}in_proj.weight M,H; {0}conv1d.weight 2A,1,4; "
              "{0}conv1d.bias 2A; {0}A_log N; {0}D N; {0}dt_bias N; {0}norm.weight A; "
              "{0}out_proj.weight H,A".format("backbone.layers.0.mixer."),
        mtp=EH + "{1}final_layernorm.weight H",
        config={"mlp_hidden_act": "relu2", "mtp_hybrid_override_pattern": "*E"}),
    "deepseek_v4": Family(
        "DeepseekV4", at="layers.{}.", attention="attn.", ffn="ffn.", gate_up_down=W,
        linears="wq_a Q,H q; wq_b A,Q; wkv D,H k; wo_a Q,A; wo_b H,Q",
        beside="q_norm.weight Q; kv_norm.weight D; attn_sink N!",
        router="gate.weight E,H; gate.bias E!",
        norms="attn_norm.weight H; hc_attn_base 8!; hc_attn_fn 8,2H!; hc_attn_scale 3!; "
              "ffn_norm.weight H; hc_ffn_base 8!; hc_ffn_fn 8,2H!; hc_ffn_scale 3!",
        model="embed.weight V,H; norm.weight H; head.weight V,H; "
              "hc_head_base 2!; hc_head_fn 2,2H!; hc_head_scale 1!",
        mtp_at="mtp.{}.",
        mtp="{0}enorm.weight H; {0}hnorm.weight H; {0}norm.weight H; "
            "{0}hc_head_base 2!; {0}hc_head_fn 2,2H!; {0}hc_head_scale 1!",
        config={"expert_dtype": "fp4", "hc_mult": 2, "q_lora_rank": 64, "o_groups": 1}),
}
# fmt: on


@dataclass(frozen=True)
class Draft:
    """What has been built so far: tensors, and every quantised module's truth and encoding."""

    spec: Spec
    tensors: Tensors = field(default_factory=dict)
    truth: Tensors = field(default_factory=dict)
    encodings: dict[str, Encoding] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return FAMILIES[self.spec.model_type]

    def random(self, name: str) -> Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.spec.seed} {name}".encode()))

    def scalar(self, name: str) -> Tensor:
        """Float32 `[]` between 1e-5 and 1e-3, uniform in its logarithm."""
        return 10 ** (-5 + 2 * torch.rand((), generator=self.random(name)))

    def plain(self, at: str, table: str) -> None:
        for name, shape in (entry.split() for entry in table.split("; ") if entry):
            values = torch.randn(self.spec.shape(shape), generator=self.random(at + name)) * 0.02
            self.tensors[at + name] = values if "!" in shape else values.to(self.spec.dtype)

    def linear(
        self, module: str, shape: str, encoding: Encoding,
        group: str = "", inputs: str = "", ratio: float = 1.0, bias: bool = False,
    ) -> None:  # fmt: skip
        """One `group` shares its factor (up to `ratio`), one `inputs` its input scale."""
        rows, cols = self.spec.shape(shape)
        if bias:
            self.plain(module, f".bias {rows}")
        if encoding == "bf16":
            return self.plain(module, f".weight {rows},{cols}")
        factor = self.scalar(f"{group or module} factor") * ratio
        act = self.scalar(f"{inputs or group or module} input")
        leaves, truth = encode(self.spec, encoding, self.random(module), rows, cols, factor, act)
        self.tensors.update({f"{module}.{leaf}": t.contiguous() for leaf, t in leaves.items()})
        self.truth[module], self.encodings[module] = truth, encoding
        return None


def encode(
    s: Spec, encoding: Encoding, draw: Generator, rows: int, cols: int, factor: Tensor, act: Tensor
) -> tuple[Tensors, Tensor]:
    """The leaves of a `[rows, cols]` linear, and the float32 weight that they stand for."""
    tall, wide = {
        "nvfp4": (1, 16), "mxfp4": (1, 32), "int4": (1, 32),
        "fp8": (rows, cols), "fp8_channel": (1, cols), "fp8_block": (128, 128),
    }[encoding]  # fmt: skip
    if (encoding == "int4" and not s.ct) or (tall == 1 and cols % wide):
        raise ValueError(f"no {encoding} of {cols} columns in {s.dialect}")
    size = (-(-rows // tall), -(-cols // wide))
    v4, four = s.model_type == "deepseek_v4", not encoding.startswith("fp8")
    codes = torch.randint(16 if four else 256, (rows, cols), generator=draw, dtype=torch.uint8)
    if encoding == "int4":  # value + 8, eight to an int32, the first lowest
        words = (codes.long().reshape(rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
        weight, values = words.to(torch.uint32).view(torch.int32), codes.float() - 8
    elif four:
        weight, values = codes[:, 0::2] | codes[:, 1::2] << 4, GRID[codes.long()]
    else:  # E4M3 without NaN
        weight = torch.where(codes & 0x7F == 0x7F, codes - 1, codes).view(torch.float8_e4m3fn)
        values = weight.float()
    leaves = {"weight_packed" if s.ct and four else "weight": weight}
    if encoding == "nvfp4":  # the two scales meet first, rounded once
        scale = leaves["weight_scale"] = block_scales(draw, size, s.tiny_scales)
        if s.ct:
            leaves |= {"weight_global_scale": (1 / factor)[None]}
            inputs = {"input_global_scale": (1 / act)[None]}
            effective = scale.float() / (1 / factor)
        else:
            leaves |= {"weight_scale_2": factor}
            inputs = {"input_scale": act}
            effective = scale.float() * factor
        leaves |= {} if s.w4a16 else inputs
    elif encoding == "mxfp4" or v4:
        scale = torch.randint(108, 125, size, generator=draw, dtype=torch.uint8)
        effective = (scale.int() << 23).view(torch.float32)  # 2^(byte - 127)
        if v4:
            leaves = {"weight": weight.view(torch.int8) if four else weight}
            leaves["scale"] = scale.view(torch.float8_e8m0fnu)
        else:
            leaves["weight_scale"] = scale
    else:
        vary = torch.ones(size) if encoding == "fp8" else 0.5 + torch.rand(size, generator=draw)
        scale = (factor * vary).to(s.dtype if s.ct else torch.float32)
        effective = scale.float()
        if encoding == "fp8":
            scale = scale.reshape(1 if s.ct else ())
            leaves["input_scale"] = act.to(scale.dtype).reshape(scale.shape)
        elif encoding == "fp8_channel" and not s.ct:
            scale = scale[:, 0]
        inv = encoding == "fp8_block" and not s.ct
        leaves["weight_scale_inv" if inv else "weight_scale"] = scale
        if encoding == "int4":
            leaves["weight_shape"] = torch.tensor([rows, cols])
    spread = effective.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :cols]
    return leaves, values * spread


def block_scales(draw: Generator, size: tuple[int, int], tiny: bool) -> Tensor:
    """E4M3: the greatest in [112, 448], most within 2^6 of it, one in 64 anywhere down to 2^-6."""
    top = 448 * 2 ** -(2 * torch.rand((), generator=draw))
    rare = torch.randint(64, size, generator=draw) == 0
    values = top * 2 ** -(torch.rand(size, generator=draw) * torch.where(rare, 12.8, 6.0))
    if tiny:
        values[rare] = torch.randint(1, 8, size, generator=draw)[rare] * 2.0**-9
    values[0, 0] = top
    return values.to(torch.float8_e4m3fn)


def attention(d: Draft, at: str) -> None:
    s, ratio = d.spec, d.spec.qkv_ratio or 1.0
    k, v = ratio if isinstance(ratio, tuple) else (ratio, ratio)
    for name, shape, *part in (entry.split() for entry in d.family.linears.split("; ")):
        own = {"k": k, "v": v}.get("".join(part), 1.0)
        group = f"{at}qkv" if part else ""
        d.linear(at + name, shape, s.attention, group, ratio=own, bias=s.biases and bool(part))
    d.plain(at, d.family.beside)
    for x in "kv" if s.kv_scales else "":
        name, scale = f"{at}{x}_proj.{x}_scale", d.scalar(f"{at}{x} scale")
        d.tensors.update({f"{at}{x}_scale": scale[None].to(s.dtype)} if s.ct else {name: scale})


def mlp(d: Draft, at: str, width: int, gate_up: Encoding, down: Encoding, expert: int = -1) -> None:
    """gate, up, down; a layer's experts share their input scales (CT: only gate's and up's)."""
    s, (gate, up, last), layer = d.spec, d.family.gate_up_down, at.removesuffix(f"{expert}.")
    ratio = s.gate_up_ratio or 1.0
    if isinstance(ratio, tuple):
        ratio = ratio[expert] if expert >= 0 else 1.0
    if s.gated and s.model_type != "nemotron_h":
        d.linear(at + gate, f"{width},H", gate_up, at + "up", layer, bias=s.expert_biases)
    d.linear(at + up, f"{width},H", gate_up, at + "up", layer, ratio, s.expert_biases)
    inputs = "" if s.ct else f"{layer}down"
    d.linear(at + last, f"H,{width}", down, inputs=inputs, bias=s.expert_biases)


def block(d: Draft, at: str, after: str) -> None:
    """A decoder layer: attention under `at`, the MLP under `after`."""
    s, ffn = d.spec, after + d.family.ffn
    for prefix in sorted({at, after}):
        d.plain(prefix, d.family.norms)
    attention(d, at + d.family.attention)
    if not (s.experts and d.family.count):
        return mlp(d, ffn, s.intermediate, s.gate_up, s.down)
    d.plain(ffn, d.family.router)
    for x in range(s.experts):
        mlp(d, f"{ffn}experts.{x}.", s.intermediate, s.gate_up, s.down, x)
    if s.shared_experts:
        mlp(d, ffn + d.family.shared, s.intermediate * s.shared_experts, s.shared, s.shared)
    return None


def draft(spec: Spec) -> Draft:
    """The whole model and its MTP layers."""
    v4, pairs = spec.model_type == "deepseek_v4", spec.model_type == "nemotron_h"
    if v4:
        spec = replace(spec, attention="fp8_block", shared="fp8_block", kv_scales=False)
    d = Draft(spec)
    d.plain("", d.family.model)
    for n in range(spec.layers):
        at, after = (2 * n + 1, 2 * n + 2) if pairs else (n, n)
        block(d, d.family.at.format(at), d.family.at.format(after))
    kind: Encoding = "mxfp4" if v4 else spec.mtp
    own = replace(spec, gate_up=kind, down=kind)
    m = replace(d, spec=own if v4 else replace(own, attention=kind, shared=kind))
    for n in range(spec.mtp_layers):
        first = n + (spec.layers if spec.model_type == "deepseek_v3" else 0)
        at, after = (2 * n, 2 * n + 1) if pairs else (first, first)
        prefixes = d.family.mtp_at.format(at), d.family.mtp_at.format(after)
        m.plain("", d.family.mtp.format(*prefixes))
        for name in ("e_proj", "h_proj") if v4 else ():
            m.linear(prefixes[0] + name, "H,H", "fp8_block")
        block(m, *prefixes)
    return d


def plain(d: Draft) -> list[str]:
    """The linears that stay plain; ModelOpt adds embeddings, and lists MTP layers by a prefix."""
    names = (n.removesuffix(".weight") for n, t in d.tensors.items() if t.dim() == 2)
    found = [n for n in names if f"{n}.weight" in d.tensors and n not in d.encodings]
    if d.spec.ct:
        return sorted(n for n in found if "embed" not in n)
    tail = f"model.layers.{d.spec.layers}" if d.spec.model_type == "deepseek_v3" else "mtp"
    return sorted({f"{tail}*" if n.startswith(f"{tail}.") else n for n in found})


# fmt: off
def model_config(s: Spec) -> Json:
    family = FAMILIES[s.model_type]
    config: Json = {
        "architectures": [f"{family.cls}ForCausalLM"], "model_type": s.model_type,
        "dtype": s.config_dtype, "hidden_size": s.hidden, "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "head_dim": s.head_dim,
        "num_key_value_heads": s.kv_heads, "vocab_size": VOCAB, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "5.14.1",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    if s.mtp_layers:
        config["num_nextn_predict_layers"] = s.mtp_layers
    if family.count:
        config |= {family.count: s.experts, "num_experts_per_tok": 2}
        if family.ffn != "block_sparse_moe.":
            config["moe_intermediate_size"] = s.intermediate
    if family.count == "n_routed_experts":
        config["n_shared_experts"] = s.shared_experts
    match s.model_type:
        case "nemotron_h":
            pattern = "M" + ("*E" if s.experts else "*-") * s.layers
            config |= {"num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern}
        case "qwen3_next":
            config |= {"shared_expert_intermediate_size": s.intermediate * s.shared_experts,
                       "layer_types": ["full_attention"] * s.layers}
        case "deepseek_v3":
            config |= {"qk_nope_head_dim": s.head_dim, "v_head_dim": s.head_dim}
    return config | family.config


def modelopt_config(d: Draft) -> tuple[Json, Json]:
    """quantization_config and hf_quant_config.json; experts stand together if they agree."""
    algo = {"nvfp4": "W4A16_NVFP4" if d.spec.w4a16 else "NVFP4", "fp8": "FP8", "mxfp4": "MXFP4",
            "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN", "fp8_block": "FP8_PB_WO"}
    group: dict[str, Json] = {"nvfp4": {"group_size": 16}, "mxfp4": {"group_size": 32}}
    v4 = d.spec.model_type == "deepseek_v4"
    layers: dict[str, Encoding] = {}
    for module, kind in d.encodings.items():
        head, experts, _ = module.partition(".experts.")
        mates = {k for m, k in d.encodings.items() if m.startswith(head + experts)}
        if not v4 or kind == "nvfp4":
            layers[f"{head}.experts" if experts and len(mates) == 1 else module] = kind
    groups: dict[str, Json] = {}
    kinds = list(dict.fromkeys(layers.values()))
    for n, kind in enumerate(kinds):
        args = {"dynamic": False, "num_bits": 8 if "fp8" in kind else 4, "type": "float",
                **group.get(kind, {})}
        names = ["Linear"] if len(kinds) == 1 else sorted(m for m in layers if layers[m] == kind)
        groups[f"group_{n}"] = {"weights": args, "targets": names}
        if not algo[kind].startswith("W4A16"):
            groups[f"group_{n}"]["input_activations"] = args
    quant: Json = {"quant_algo": algo[kinds[0]],
                   "kv_cache_quant_algo": "FP8" if d.spec.kv_scales else None}
    if v4 or len(kinds) > 1:
        quant["quant_algo"] = "MIXED_PRECISION"
        quant["quantized_layers"] = {
            m: {"quant_algo": algo[k], **group.get(k, {})} for m, k in layers.items()}
    if len(kinds) == 1:
        ignore = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"] if v4 else plain(d)
        quant |= group.get(kinds[0], {}) | {"exclude_modules": ignore}
    producer = {"name": "modelopt", "version": "dsv4-nvfp4-experts" if v4 else "0.47.0"}
    config: Json = {
        "config_groups": groups, "ignore": quant.get("exclude_modules", []), "producer": producer,
        "quant_method": "modelopt",
        **{k: quant[k] for k in ("quant_algo", "quantized_layers") if k in quant},
    }
    if d.spec.kv_scales:
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if v4:
        config |= {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                   "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "group_size": 16,
                   "moe_quant_algo": "NVFP4", "kv_cache_quant_algo": None}
    return config, {"producer": producer, "quantization": quant}


def ct_config(d: Draft) -> Json:
    base: Json = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "group_size": None,
        "symmetric": True, "dynamic": False, "actorder": None, "block_structure": None,
        "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": None,
        "zp_dtype": None,
    }
    live = {"dynamic": True, "observer": None}
    local = {"dynamic": "local", "observer": "static_minmax"}
    nv = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16,
          "scale_dtype": "torch.float8_e4m3fn"}
    mx = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    int4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "int"}
    block = {"strategy": "block", "block_structure": [128, 128]}
    schemes: dict[str, tuple[str, Json, Json | None]] = {
        "nvfp4": ("nvfp4-pack-quantized", nv, None if d.spec.w4a16 else nv | local),
        "mxfp4": ("mxfp4-pack-quantized", mx, mx | live),
        "int4": ("pack-quantized", int4, None),
        "fp8": ("float-quantized", {}, {}),
        "fp8_channel": ("float-quantized", {"strategy": "channel"}, {"strategy": "token"} | live),
        "fp8_block": ("float-quantized", block, {"strategy": "group", "group_size": 128} | live),
    }
    groups, kinds = {}, list(dict.fromkeys(d.encodings.values()))
    for n, kind in enumerate(kinds):
        name, weights, acts = schemes[kind]
        groups[f"group_{n}"] = {
            "format": name, "weights": base | weights, "output_activations": None,
            "input_activations": None if acts is None else base | acts,
            "targets": [m for m, k in d.encodings.items() if k == kind]
                       if len(kinds) > 1 else ["Linear"],
        }
    formats = sorted({schemes[kind][0] for kind in kinds})
    return {
        "config_groups": groups, "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "ignore": plain(d), "kv_cache_scheme": base if d.spec.kv_scales else None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "version": "0.19.0", "sparsity_config": {}, "transform_config": {},
        "global_compression_ratio": None,
    }
# fmt: on


def build(path: Path, spec: Spec) -> Tensors:
    """Writes the folder; returns the float32 weight of every quantised module, by module name."""
    if spec.ct and spec.model_type == "deepseek_v4":
        raise ValueError("deepseek_v4 is NVIDIA's repack: dialect modelopt")
    d, config = draft(spec), model_config(spec)
    path.mkdir(parents=True, exist_ok=True)
    if spec.ct:
        config["quantization_config"] = ct_config(d)
    else:
        config["quantization_config"], beside = modelopt_config(d)
        write_json(path / "hf_quant_config.json", beside)
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_json(path / "tokenizer.json", {"version": "1.0", "model": {"type": "BPE", "vocab": {}}})
    write(path, shard(d))
    return d.truth


def shard(d: Draft) -> dict[str, Tensors]:
    """Files by name: the sorted tensors in even parts, every cut inside a quantised linear."""
    names, count = sorted(d.tensors), d.spec.shards
    if count == 1:
        return {"model.safetensors": d.tensors}
    modules = [name.rpartition(".")[0] for name in names]
    inside = [i for i, m in enumerate(modules) if i and m == modules[i - 1] and m in d.truth]
    even = [len(names) * n // count for n in range(1, count)]
    cuts = [0, *(min(inside, key=lambda i: abs(i - at)) for at in even), len(names)]
    return {
        f"model-{n + 1:05}-of-{count:05}.safetensors": {
            name: d.tensors[name] for name in names[cuts[n] : cuts[n + 1]]
        }
        for n in range(count)
    }


def write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write(path: Path, files: dict[str, Tensors]) -> None:
    """Writes the shards, and an index if there are several."""
    for file, tensors in files.items():
        (path / file).unlink(missing_ok=True)  # who has mapped the old file keeps it
        (path / file).write_bytes(save(tensors, metadata={"format": "pt"}))
    if len(files) > 1:
        total = sum(t.nbytes for tensors in files.values() for t in tensors.values())
        names = {name: file for file, tensors in files.items() for name in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        write_json(path / "model.safetensors.index.json", index)


def edit(path: Path, changes: Callable[[Tensors], Tensors]) -> None:
    """Rewrites the shards: a tensor stays in its file by name, new ones go to the last."""
    shards = sorted(path.glob("*.safetensors"))
    old = {p.name: {name: t.clone() for name, t in load_file(p).items()} for p in shards}
    home = {name: file for file, tensors in old.items() for name in tensors}
    files: dict[str, Tensors] = {file: {} for file in old}
    for name, t in changes({n: t for tensors in old.values() for n, t in tensors.items()}).items():
        files[home.get(name, shards[-1].name)][name] = t.contiguous()
    write(path, files)


def edit_config(path: Path, change: Callable[[Json], Json], file: str = "config.json") -> None:
    write_json(path / file, change(json.loads((path / file).read_text())))
