"""Small checkpoints as every producer writes them: `KINDS[name](path)` writes one.

An independent hand like tests/build.py, which draws the model and what is plain in it; here its
linears are written anew. Hidden, intermediate, twice it, experts and vocabulary differ in size.
"""

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from tests import build
from tests.build import GRID, Draft, Encoding, Json, Spec, Tensors, block_scales, write_json

BF16, E4M3, E8M0 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu
Config = Callable[[Draft], tuple[Json, Json]]  # quantization_config, hf_quant_config.json; {}: none
Groups = dict[str, tuple[Encoding, list[str]]]


class Sized(Spec):
    """Latent attention with 576 rows in kv_a_proj_with_mqa, as DeepSeek's own."""

    def shape(self, text: str) -> list[int]:
        large = {"K": 512, "KR": 576, "AR": self.heads * (self.head_dim + 64)}
        return super().shape(",".join(str(large.get(x, x)) for x in text.rstrip("!").split(",")))


SMALL = Sized(hidden=192, intermediate=160, experts=3)
BLOCKS = replace(SMALL, hidden=320, intermediate=192, head_dim=56)  # partial last blocks
WHOLE = replace(SMALL, hidden=384, intermediate=256)  # every K a multiple of 128


@dataclass(frozen=True)
class Scheme:
    """How one producer writes one linear."""

    codes: Literal["fp4", "fp8", "int4"]
    block: tuple[int, int]  # rows and columns of one scale; 0: all of them
    scale: Literal["e4m3", "u8", "e8m0", "pow2", "f32", "bf16"]
    leaves: str = "weight weight_scale"  # and global, input scale; "-": none; "/": a reciprocal
    shape: Literal["2d", "[]", "[1]", "[n]", "4d", "1d"] = "2d"  # "[]", "[1]": of every scalar
    dtype: torch.dtype = torch.uint8  # of packed FP4

    @property
    def names(self) -> list[str]:
        return [*self.leaves.split(), "-", "-"][:4]


# fmt: off
W, MX, NV = (128, 128), "weight weight_scale", "weight weight_scale weight_scale_2 input_scale"
CT, INV = "weight_packed weight_scale /weight_global_scale", "weight weight_scale_inv"
MODELOPT = {
    "NVFP4": Scheme("fp4", (1, 16), "e4m3", NV),
    "W4A8_NVFP4_FP8": Scheme("fp4", (1, 32), "e4m3", NV),
    "FP8": Scheme("fp8", (0, 0), "f32", f"{MX} - input_scale", "[]"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", (1, 0), "f32", shape="[n]"),
    "fp8_pb_wo": Scheme("fp8", W, "f32", shape="4d"),
    "MXFP8": Scheme("fp8", (1, 32), "u8"),
    "MXFP4": Scheme("fp4", (1, 32), "u8"),
}
COMPRESSED = {
    "nvfp4": Scheme("fp4", (1, 16), "e4m3", f"{CT} /input_global_scale", "[1]"),
    "nvfp4a16": Scheme("fp4", (1, 16), "e4m3", CT, "[1]"),
    "mxfp4": Scheme("fp4", (1, 32), "u8", "weight_packed weight_scale"),
    "mxfp8": Scheme("fp8", (1, 32), "u8"),
    "fp8": Scheme("fp8", (0, 0), "bf16", f"{MX} - input_scale", "[1]"),
    "fp8_channel": Scheme("fp8", (1, 0), "bf16"),
    "fp8_channel_f32": Scheme("fp8", (1, 0), "f32"),
    "fp8_block": Scheme("fp8", W, "bf16"),
    "int4": Scheme("int4", (1, 32), "bf16", "weight_packed weight_scale"),
}
FP8 = {
    "f32": Scheme("fp8", W, "f32", INV), "bf16": Scheme("fp8", W, "bf16", INV),
    "e8m0": Scheme("fp8", W, "e8m0", INV), "pow2": Scheme("fp8", W, "pow2", INV),
    "1d": Scheme("fp8", W, "f32", INV, "1d"),  # where there is one row of blocks
    "mxfp8": Scheme("fp8", (1, 32), "u8", INV), "fbgemm": Scheme("fp8", (1, 0), "f32"),
    "tensor": Scheme("fp8", (0, 0), "f32", f"{MX} - input_scale", "[1]"),
    "v4": Scheme("fp8", W, "e8m0", "weight scale"), "mxfp4": MODELOPT["MXFP4"],
    "v4_base": Scheme("fp8", W, "f32", "weight scale"),
    "v4_fp4": Scheme("fp4", (1, 32), "e8m0", "weight scale", dtype=torch.int8),
}
QUARK = {
    "mxfp4": MODELOPT["MXFP4"], "fp8": MODELOPT["FP8"], "block": Scheme("fp8", W, "f32"),
    "ptpc": MODELOPT["FP8_PER_CHANNEL_PER_TOKEN"],
    "mxfp4_fp8": Scheme("fp4", (1, 32), "u8", f"{MX} - input_scale"),
    "nvfp4": Scheme("fp4", (1, 16), "e4m3", f"{NV}_2"),
}
# fmt: on


@dataclass(frozen=True)
class Built:
    """A checkpoint: every tensor, and what its linears stand for by per-expert module name."""

    tensors: Tensors = field(default_factory=dict)
    truth: Tensors = field(default_factory=dict)  # float32 [N, K]
    inputs: Tensors = field(default_factory=dict)  # static activation scales: float32 multipliers
    biases: Tensors = field(default_factory=dict)  # of quantised modules
    kv: Tensors = field(default_factory=dict)  # by "...self_attn.k", "...self_attn.v": float32 []
    rest: Tensors = field(default_factory=dict)  # of no quantised weight


def draw(name: str) -> Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def scalar(name: str) -> Tensor:
    return 10 ** (-5 + 2 * torch.rand((), generator=draw(name)))


def encode(s: Scheme, module: str, rows: int, cols: int, mates: str) -> tuple[Tensors, Tensor]:
    """A linear's leaves but the input's, and its truth; `mates` have one global scale."""
    g, (tall, wide) = draw(module), (s.block[0] or rows, s.block[1] or cols)
    size = (math.ceil(rows / tall), math.ceil(cols / wide))
    codes = torch.randint(256 if s.codes == "fp8" else 16, (rows, cols), generator=g).byte()
    leaves = {}
    if s.codes == "int4":  # value + 8, eight to an int32, the first lowest
        words = (codes.long().reshape(rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
        weight, values = words.to(torch.uint32).view(torch.int32), codes.float() - 8
        leaves["weight_shape"] = torch.tensor([rows, cols])
    elif s.codes == "fp4":
        weight, values = (codes[:, 0::2] | codes[:, 1::2] << 4).view(s.dtype), GRID[codes.long()]
    else:  # E4M3 without NaN
        weight = torch.where(codes & 0x7F == 0x7F, codes - 1, codes).view(E4M3)
        values = weight.float()
    if s.scale in ("u8", "e8m0", "pow2"):  # within 2^12 of the layer's greatest
        layer = re.sub(r"experts\.\d+\.", "experts.", mates).rpartition(".")[0]
        top = 104 + zlib.crc32(layer.encode()) % 31
        byte = (top - torch.randint(13, size, generator=g)).byte()
        effective = (byte.int() << 23).view(torch.float32)  # 2^(byte - 127)
        scale = {"u8": byte, "e8m0": byte.view(E8M0), "pow2": effective}[s.scale]
    elif s.scale == "e4m3":
        scale, factor = block_scales(g, size, tiny=False), scalar(f"{mates} factor")
        if wide == 32:  # W4A8_NVFP4_FP8: 448 is the weight's greatest, not the scale's
            scale = (scale.float() / 6).to(E4M3)
        if s.names[2].startswith("/"):
            leaves[s.names[2][1:]] = (1 / factor)[None]
            effective = scale.float() / (1 / factor)
        else:
            leaves[s.names[2]] = factor
            effective = scale.float() * factor
    else:
        scale = scalar(f"{module} factor") * (0.5 + torch.rand(size, generator=g))
        scale = scale.to(BF16 if s.scale == "bf16" else torch.float32)
        effective = scale.float()
    if s.shape in ("[]", "[1]") and s.block == (0, 0):
        scale = scale.reshape([1] if s.shape == "[1]" else [])
    elif s.shape == "[n]" or (s.shape == "1d" and size[0] == 1):
        scale = scale.flatten()
    elif s.shape == "4d":
        scale = scale[:, None, :, None]
    leaves |= {s.names[0]: weight, s.names[1]: scale}
    spread = effective.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :cols]
    return leaves, values * spread


def linear(b: Built, module: str, shape: torch.Size, s: Scheme, one_scalar: bool) -> None:
    mates = re.sub(r"\.(w[13]|(gate|up)_proj)$", ".w13", re.sub(r"[qkv]_proj$", "qkv", module))
    layer = re.sub(r"experts\.\d+\.", "experts.", mates)
    rows, cols = shape
    leaves, b.truth[module] = encode(s, module, rows, cols, layer if one_scalar else mates)
    if (name := s.names[3]) != "-":
        over, act = name[0] == "/", scalar(f"{layer} input")
        act = (1 / act if over else act).to(BF16 if s.scale == "bf16" else torch.float32)
        b.inputs[module] = 1 / act.float() if over else act.float()
        leaves[name.lstrip("/")] = act[None] if s.shape == "[1]" else act
    b.tensors.update({f"{module}.{leaf}": t for leaf, t in leaves.items()})


def letter(module: str) -> str:
    """The class of a linear: expert, shared, head, attention, dense and the rest."""
    found = re.search(r"expert(?=s\.\d)|shared|head|attn", module)
    return found[0][0] if found else "d"


def move(b: Built, pattern: str, into: str) -> None:
    for name in [n for n in b.tensors if re.search(pattern, n)]:
        b.tensors[re.sub(pattern, into, name)] = b.tensors.pop(name)


def turn(b: Built) -> None:
    move(b, r"experts\.(\d+)\.(\w+_proj)\.", r"experts.\2.\1.")


def smooth(b: Built) -> None:
    for module, t in b.truth.items():
        values = 0.5 + torch.rand(t.shape[1], generator=draw(f"{module} smooth"))
        b.tensors[f"{module}.pre_quant_scale"] = values.to(BF16)


def hashed(b: Built, at: str = "") -> None:
    """DeepSeek-V4's hash-routed layer, and an indexer."""
    name = f"{at}layers.0.ffn.gate.tid2eid"
    b.tensors[name] = b.rest[name] = torch.arange(2 * build.VOCAB).reshape(-1, 2) % 3
    linear(b, f"{at}layers.1.attn.indexer.wq_b", torch.Size([64, 96]), FP8["v4"], False)


def halved(b: Built) -> None:
    hashed(b, "model.")
    for name in [n for n, t in b.rest.items() if t.dtype == torch.float32]:
        b.tensors[name] = b.rest[name] = b.rest[name].to(BF16)


def interleave(gate: Tensor, up: Tensor, dim: int) -> Tensor:
    return torch.stack([gate, up], dim + 1).flatten(dim, dim + 1)


def fuse(b: Built) -> None:
    """3-D experts: gpt-oss's blocks, or transposed as ModelOpt does, one scalar for all."""
    found: dict[tuple[str, str, str], list[Tensor]] = {}
    for name in [n for n in b.tensors if re.search(r"experts\.\d", n)]:
        at, proj, leaf = re.sub(r"(experts\.)\d+\.(\w+)\.", r"\1|\2|", name).split("|")
        found.setdefault((at, proj, leaf), []).append(b.tensors.pop(name))
        b.rest.pop(name, None)
    for (at, proj, leaf), parts in found.items():
        t = torch.stack(parts)
        if proj == "up_proj":
            continue
        if proj == "gate_proj" and t.dim() > 1:
            up = torch.stack(found[at, "up_proj", leaf])
            t = interleave(t, up, 1) if b.biases else torch.cat([t, up], 1)
        name = at + proj.replace("gate", "gate_up")
        if leaf == "bias":
            b.rest[f"{name}_bias"] = b.tensors[f"{name}_bias"] = t
        elif not b.inputs:  # MXFP4
            name += "_blocks" if leaf == "weight" else "_scales"
            b.tensors[name] = t.reshape(*t.shape[:-1], -1, 16) if leaf == "weight" else t
        else:
            name += "" if leaf == "weight" else f"_{leaf}"
            b.tensors[name] = t.transpose(1, 2).contiguous() if t.dim() == 3 else t[0]


def pair(b: Built) -> None:
    """Quark's gpt-oss: gate and up of an expert in one linear, rows interleaved."""
    for name in [n for n in b.tensors if ".gate_proj." in n]:
        gate, up = b.tensors.pop(name), b.tensors.pop(name.replace("gate_proj", "up_proj"))
        both = name.replace("gate_proj", "gate_up_proj")
        b.tensors[both] = interleave(gate, up, 0) if gate.dim() else gate
        if name in b.rest:
            b.rest[both] = b.tensors[both]
            del b.rest[name], b.rest[name.replace("gate_proj", "up_proj")]


def modelopt(d: Draft, algo: str, here: bool = True) -> tuple[Json, Json]:
    made, beside = build.modelopt_config(replace(d, encodings=dict.fromkeys(d.truth, "nvfp4")))
    s, quant = MODELOPT[algo.replace("_AWQ", "")], beside["quantization"]
    short = (re.sub(r"(self_attn|visual)\..*", r"\1*", n) for n in quant["exclude_modules"])
    made["ignore"] = quant["exclude_modules"] = sorted(set(short))
    made["quant_algo"] = quant["quant_algo"] = algo
    quant["group_size"] = s.block[1]
    if s.block[0] != 1 or not s.block[1]:
        del quant["group_size"]
    if algo == "FP8":
        args = {"dynamic": False, "num_bits": 8, "type": "float"}
        made["config_groups"]["group_0"] |= {"weights": args, "input_activations": args}
    elif algo != "NVFP4":
        del made["config_groups"]
    if algo == "NVFP4_AWQ":
        quant |= {"has_zero_point": False, "pre_quant_scale": True}
    return made if here else {}, beside


def compressed(d: Draft, encoding: Encoding, changes: Json) -> tuple[Json, Json]:
    """One group for all; `changes` replace what it has, or what is in its dicts."""
    made = build.ct_config(replace(d, encodings=dict.fromkeys(d.truth, encoding)))
    group = made["config_groups"]["group_0"]
    for key, value in changes.items():
        group[key] = group[key] | value if isinstance(value, dict) else value
    return made | {"format": group["format"]}, {}


def grouped(d: Draft, groups: Groups, ignore: list[str]) -> tuple[Json, Json]:
    """Groups by name, with their targets; "re:" as the authors of recipes write them."""
    kinds = [encoding for encoding, _ in groups.values()]
    made = build.ct_config(replace(d, encodings=dict(zip(d.truth, kinds, strict=False))))
    named = zip(groups.items(), made["config_groups"].values(), strict=True)
    made["config_groups"] = {name: group | {"targets": to} for (name, (_, to)), group in named}
    return made | {"ignore": ignore}, {}


DEEPSEEK: Json = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
DEEPSEEK |= {"activation_scheme": "dynamic"}
UE8M0: Json = DEEPSEEK | {"scale_fmt": "ue8m0"}


def fixed(d: Draft, made: Json, listed: str = "") -> tuple[Json, Json]:
    """`listed`: the key of the modules that are not quantised, norms too."""
    plain = (n[:-7] for n in d.tensors if n.endswith(".weight"))
    return made | ({listed: sorted(set(plain) - set(d.truth))} if listed else {}), {}


# fmt: off
SPEC: Json = {
    "block_size": None, "ch_axis": None, "dtype": "fp8_e4m3", "enable_buffer_reuse": False,
    "group_size": None, "is_dynamic": False, "is_scale_quant": False, "max_input_numel": 4194304,
    "mx_element_dtype": None, "observer_cls": "PerTensorMinMaxObserver", "qscheme": "per_tensor",
    "round_method": "half_even", "scale_calculation_mode": None, "scale_format": None,
    "scale_type": "float", "symmetric": True, "zero_point_type": "int32"}
GROUP = SPEC | {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "symmetric": None}
MXSPEC = GROUP | {"group_size": 32, "observer_cls": "PerBlockMXObserver", "scale_format": "e8m0",
                  "scale_calculation_mode": "even"}
NVSPEC, OF, DYN = GROUP | {"group_size": 16}, SPEC | {"is_scale_quant": True}, {"is_dynamic": True}
ROW = SPEC | {"qscheme": "per_channel"}
QSPECS: dict[str, tuple[Any, Any]] = {
    "mxfp4": (MXSPEC, MXSPEC | DYN), "mxfp4_fp8": (MXSPEC, SPEC), "fp8": (SPEC, SPEC),
    "ptpc": (ROW | {"ch_axis": 0}, ROW | {"ch_axis": 1} | DYN),
    "block": (SPEC | {"qscheme": "per_block", "block_size": [128, 128]},
              SPEC | DYN | {"qscheme": "per_group", "group_size": 128, "ch_axis": -1}),
    "nvfp4": ([NVSPEC, OF], [NVSPEC | DYN, OF]),
}
# fmt: on


def quark(d: Draft, scheme: str, exclude: list[str]) -> tuple[Json, Json]:
    whole: Json = dict(zip(("weight", "input_tensors"), QSPECS[scheme], strict=True))
    whole |= {"output_tensors": None, "bias": None}
    caches = ["*k_proj", "*v_proj"] if d.spec.kv_scales else []
    # fmt: off
    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "version": "0.13", "exclude": exclude,
        "algo_config": None, "softmax_quant_spec": None, "kv_cache_post_rope": False,
        "global_quant_config": whole | {"target_device": None},
        "layer_quant_config": {}, "layer_type_quant_config": {},
        "kv_cache_quant_config": {c: whole | {"output_tensors": SPEC} for c in caches},
        "export": {"kv_cache_group": caches, "min_kv_scale": 0.0, "pack_method": "reorder",
                   "weight_format": "real_quantized", "weight_merge_groups": None},
    }, {}
    # fmt: on


@dataclass(frozen=True)
class Kind:
    """One way that one producer writes a checkpoint; call it with the folder."""

    schemes: dict[str, Scheme] = field(default_factory=dict)  # by class; none: build.py's own
    config: Config | None = None
    spec: Spec = SMALL
    names: tuple[tuple[str, str], ...] = ()  # renames: patterns; into "": not there
    extra: str = ""  # a table of plain tensors
    top: Json = field(default_factory=dict)  # the config's own keys
    change: Callable[[Built], None] | None = None
    one_scalar: bool = False  # one global scale for all experts of a layer
    refused: bool = False  # what no rewriting could keep

    def rename(self, name: str) -> str:
        for pattern, into in self.names:
            if re.search(pattern, name):
                name = re.sub(pattern, into, name) if into else ""
        return name

    def draft(self) -> Built:
        fp8: Encoding = "fp8"  # whatever it is: names and shapes are wanted
        spec = replace(self.spec, attention=fp8, gate_up=fp8, down=fp8, shared=fp8, mtp=fp8)
        d, b = build.draft(spec), Built()
        d.plain("", self.extra)
        leaf = re.compile(r"\.((weight_|input_)?scale(_inv)?|weight)$")
        linears = {self.rename(m): t.shape for m, t in d.truth.items()}
        for name, t in d.tensors.items():
            if not (leaf.search(name) and name.rpartition(".")[0] in d.truth):
                b.rest[self.rename(name)] = t
        b.rest.pop("", None)
        if "h" in self.schemes:
            linears["lm_head"] = b.rest.pop("lm_head.weight").shape
        for module, shape in linears.items():
            if scheme := self.schemes.get(letter(module)):
                linear(b, module, shape, scheme, self.one_scalar)
                if f"{module}.bias" in b.rest:
                    b.biases[module] = b.rest[f"{module}.bias"]
            else:
                b.rest[f"{module}.weight"] = (torch.randn(shape, generator=draw(module))).to(BF16)
        b.tensors.update(b.rest)
        return b

    def __call__(self, path: Path) -> Built:
        path.mkdir(parents=True, exist_ok=True)
        if self.config is None:
            build.build(path, self.spec)
            d = build.draft(self.spec)
            inputs = (m for m in d.truth if f"{m}.input_scale" in d.tensors)
            b = Built(d.tensors, d.truth, {m: d.tensors[f"{m}.input_scale"] for m in inputs})
            leaf = re.compile(r"\.((weight_|input_)?scale(_2)?|weight)$")
            own = {n for n in d.tensors if leaf.search(n) and n.rpartition(".")[0] in d.truth}
            b.rest.update((n, t) for n, t in d.tensors.items() if n not in own)
        else:
            b = self.draft()
            if self.change:
                self.change(b)
            d = Draft(self.spec, b.rest, b.truth)
            made, beside = self.config(d)
            model = {} if "text_config" in self.top else build.model_config(self.spec)
            top = {"quantization_config": made} if made else {}
            write_json(path / "config.json", model | self.top | top)
            write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
            if beside:
                write_json(path / "hf_quant_config.json", beside)
            contiguous = {n: t.contiguous() for n, t in b.tensors.items()}
            build.write(path, build.shard(replace(d, tensors=contiguous)))
        for name, t in b.rest.items():
            if found := re.fullmatch(r"(.*?\.)([kv])(_proj\.(\2|output))?_scale", name):
                b.kv[found[1] + found[2]] = t.float().reshape([])
        return b


# fmt: off
def mo(algo: str, only: str = "aesd", says: str = "", here: bool = True, **more: Any) -> Kind:
    config = partial(modelopt, algo=says or algo, here=here)
    return Kind(dict.fromkeys(only, MODELOPT[algo]), config, **more)


def ct(
    scheme: str, encoding: Encoding, spec: Spec = SMALL, says: Json | None = None, **more: Any
) -> Kind:
    config = partial(compressed, encoding=encoding, changes=says or {})
    spec = replace(spec, dialect="compressed-tensors")
    return Kind(dict.fromkeys("aesd", COMPRESSED[scheme]), config, spec, **more)


def ds(scheme: str, says: Json, listed: str = "", only: str = "aesd", **more: Any) -> Kind:
    config = partial(fixed, made=says, listed=listed)
    experts = {"e": FP8["v4_fp4"]} if scheme == "v4" else {}
    return Kind(dict.fromkeys(only, FP8[scheme]) | experts, config, **more)


def qk(scheme: str, *exclude: str, only: str = "aesd", **more: Any) -> Kind:
    config = partial(quark, scheme=scheme, exclude=list(exclude or ("*lm_head", "*mlp.gate")))
    return Kind(dict.fromkeys(only, QUARK[scheme]), config, **more)


LLAMA = replace(SMALL, model_type="llama", intermediate=224)
V3 = replace(BLOCKS, model_type="deepseek_v3", shared_experts=1, mtp_layers=1)
DSV4, KV = replace(V3, model_type="deepseek_v4"), replace(SMALL, kv_scales=True)
RANKS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
FP4, NO_QK = {"expert_dtype": "fp4"}, ("[qk]_norm", "")
KV_OLD = (r"\.([kv])(_proj\.\1)?_scale$", r".\1_proj.output_scale")
OSS: dict[str, Any] = {
    "only": "e", "spec": replace(SMALL, biases=True, expert_biases=True),
    "names": ((r"mlp\.gate\.", "mlp.router."), NO_QK),
    "extra": "; ".join(
        f"model.layers.{n}.{leaf}" for n in range(2)
        for leaf in ("self_attn.sinks N", "self_attn.o_proj.bias H", "mlp.router.bias E")),
    "top": {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}}
LLAMA4: dict[str, Any] = {
    "spec": replace(SMALL, shared_experts=1),
    "names": ((r"mlp\.gate\.", "mlp.router."), (r"mlp\.", "feed_forward."),
              ("shared_experts", "shared_expert"), NO_QK),
    "top": {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"],
            "moe_layers": [0, 1], "interleave_moe_layer_step": 1}}
VL: dict[str, Any] = {
    "names": ((r"^model\.(?!visual)", "model.language_model."),),
    "extra": "model.visual.patch_embed.proj.weight 48,3,2,4; model.visual.pos_embed.weight 30,48; "
             "model.visual.blocks.0.attn.qkv.weight 144,48; model.visual.blocks.0.norm1.bias 48",
    "top": {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "text_config": build.model_config(SMALL) | {"model_type": "qwen3_5_moe_text"},
            "vision_config": {"depth": 1, "hidden_size": 48}, "tie_word_embeddings": False}}
SPARSE = "; ".join(f"layers.1.attn.{leaf}" for leaf in (
    "compressor.ape 4,112!", "compressor.norm.weight D", "compressor.wkv.weight 112,H",
    "compressor.wgate.weight 112,H", "indexer.weights_proj.weight 2,H"))
V4_NAMES = (("^layers", "model.layers"), ("kv_norm", "norm"), ("^embed", "model.embed_tokens"),
            ("^norm", "model.norm"), ("^hc_head_", "model.hc_head.hc_"))
MIXED: Groups = {
    "FP8_DYNAMIC": ("fp8_channel", [r"re:.*self_attn\.(q|k|v|o)_proj$", "re:^lm_head$"]),
    "NVFP4": ("nvfp4", [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"])}
INT4: Groups = {"attention": ("int4", [r"re:.*self_attn\..*_proj$"]),
                "NVFP4": ("nvfp4", [r"re:.*experts\..*"])}
CTS, GATE = replace(SMALL, dialect="compressed-tensors"), r"re:.*mlp\.gate$"
LISTED, OSS_PLAIN = "modules_to_not_convert", ("lm_head", "*self_attn*", "*router*")
SHORT = {"fmt": "float8_e4m3fn", LISTED: ["gate", "e_score_correction_bias", "lm_head"]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS32 = UE8M0 | {"weight_block_size": [1, 32]}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
NATIVE = {"quant_method": "mxfp4", LISTED: [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
EIGHT = {"num_bits": 8}
KINDS: dict[str, Kind] = {
    "modelopt-nvfp4": Kind(),
    "modelopt-nvfp4-w4a16": Kind(spec=replace(SMALL, w4a16=True)),
    "modelopt-nvfp4-kv": Kind(spec=replace(KV, shards=2)),
    "modelopt-mixed": Kind(spec=replace(SMALL, attention="fp8")),
    "modelopt-nvfp4-hf-only": mo("NVFP4", here=False, spec=LLAMA),
    "modelopt-nvfp4-vl": mo("NVFP4", "e", **VL),
    "modelopt-nvfp4-llama4": mo("NVFP4", change=fuse, one_scalar=True, **LLAMA4),
    "modelopt-nvfp4-gptoss": mo("NVFP4", change=fuse, one_scalar=True, **OSS),
    "modelopt-nvfp4-turned": mo("NVFP4", change=turn),
    "modelopt-nvfp4-awq": mo("NVFP4", says="NVFP4_AWQ", change=smooth, refused=True),
    "modelopt-w4a8": mo("W4A8_NVFP4_FP8"),
    "modelopt-fp8": mo("FP8", spec=KV),
    "modelopt-fp8-channel": mo("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt-fp8-block": mo("fp8_pb_wo", spec=WHOLE),
    "modelopt-fp8-block-ragged": mo("fp8_pb_wo", spec=BLOCKS),
    "modelopt-mxfp8": mo("MXFP8"),
    "modelopt-mxfp4": mo("MXFP4"),
    "ct-nvfp4": ct("nvfp4", "nvfp4", replace(SMALL, shards=3)),
    "ct-nvfp4-kv": ct("nvfp4", "nvfp4", KV),
    "ct-nvfp4a16": ct("nvfp4a16", "nvfp4", replace(SMALL, model_type="minimax_m2"),
                      {"input_activations": None}),
    "ct-mxfp4": ct("mxfp4", "mxfp4"),
    "ct-mxfp8": ct("mxfp8", "mxfp4", LLAMA, {
        "format": "mxfp8-quantized", "weights": EIGHT, "input_activations": EIGHT},
        names=(("lm_head", ""),), top={"tie_word_embeddings": True}),
    "ct-fp8": ct("fp8", "fp8", KV, names=(KV_OLD,)),
    "ct-fp8-channel": ct("fp8_channel", "fp8_channel"),
    "ct-fp8-channel-f32": ct("fp8_channel_f32", "fp8_channel"),
    "ct-fp8-block": ct("fp8_block", "fp8_block", BLOCKS),
    "ct-fp8-naive": ct("fp8_channel", "fp8_channel", says={
        "format": "naive-quantized", "input_activations": None}),
    "ct-mixed": Kind(
        dict.fromkeys("ah", COMPRESSED["fp8_channel"]) | {"e": COMPRESSED["nvfp4"]},
        partial(grouped, groups=MIXED, ignore=["re:.*visual.*", GATE]), replace(CTS, shards=2),
        **VL),
    "ct-int4-nvfp4": Kind(
        {"a": COMPRESSED["int4"], "e": COMPRESSED["nvfp4"]},
        partial(grouped, groups=INT4, ignore=["lm_head", GATE]), CTS),
    "fp8-deepseek": ds("f32", DEEPSEEK, spec=replace(V3, shards=2), top=RANKS),
    "fp8-deepseek-ue8m0": ds("pow2", UE8M0, spec=V3, top=RANKS),
    "fp8-deepseek-e8m0": ds("e8m0", UE8M0, spec=V3, top=RANKS),
    "fp8-deepseek-1d": ds("1d", DEEPSEEK, spec=V3, top=RANKS),
    "fp8-qwen": ds("bf16", DEEPSEEK, LISTED, spec=BLOCKS),
    "fp8-minimax": ds("f32", DEEPSEEK | SHORT, spec=replace(BLOCKS, model_type="minimax_m2")),
    "fp8-mxfp8": ds("mxfp8", BLOCKS32),
    "fp8-mxfp8-vendor": ds("mxfp8", {"quant_method": "mxfp8"}, "ignored_layers"),
    "fp8-tensor": ds("tensor", TENSOR, spec=LLAMA),
    "fp8-fbgemm": ds("fbgemm", FBGEMM, LISTED, "d", spec=LLAMA),
    "v4-hub": ds("v4", UE8M0, spec=replace(DSV4, shards=2), extra=SPARSE, change=hashed, top=FP4),
    "v4-transformers": ds("v4", UE8M0, spec=replace(DSV4, mtp_layers=0), names=V4_NAMES,
                          extra=SPARSE, change=halved, top=FP4),
    "v4-base": ds("v4_base", DEEPSEEK, spec=DSV4, top={"expert_dtype": "fp8"}),
    "v4-nvfp4": Kind(spec=DSV4),
    "gptoss-mxfp4": ds("mxfp4", NATIVE, change=fuse, **OSS),
    "quark-mxfp4": qk("mxfp4"),
    "quark-mxfp4-llama": qk("mxfp4", "lm_head", spec=LLAMA),
    "quark-mxfp4-fp8": qk("mxfp4_fp8", "*lm_head", "*self_attn*", "*mlp.gate", only="e"),
    "quark-mxfp4-fp8-gptoss": qk("mxfp4_fp8", *OSS_PLAIN, change=pair, **OSS),
    "quark-fp8": qk("fp8", spec=KV, names=(KV_OLD,)),
    "quark-fp8-ptpc": qk("ptpc"),
    "quark-fp8-block": qk("block", spec=BLOCKS),
    "quark-nvfp4": qk("nvfp4"),
}
# fmt: on
