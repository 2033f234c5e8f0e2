"""Tensors to modules: what encoding each one is in, from names, dtypes and shapes alone.

A module is all tensors `<module>.<leaf>` with a leaf of LEAVES. What does not fit together is a
Problem: `convert` refuses it, `check` lists it. The config is a cross-check only (`disagreements`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transcode.catalog import formats
from transcode.checkpoint import Checkpoint
from transcode.errors import FormatError
from transcode.header import TensorInfo
from transcode.names import address
from transcode.quant import Encoding
from transcode.spec import Format

SCALES = ("weight_scale", "weight_scale_2", "weight_global_scale", "weight_scale_inv")
"""Leaves that make no sense without a weight."""

REFUSED = {
    "pre_quant_scale": "the activations must be multiplied by it (AWQ, SVDQuant)",
    "svdquant_lora_a": "a low-rank branch beside the weight (SVDQuant)",
    "weight_zero_point": "an asymmetric encoding",
    "weight_g_idx": "columns in activation order",
    "input_rotation": "the activations must be rotated",
    "qweight": "GPTQ or AWQ",
}
"""Leaves that change what the weight means, and why no target here can say so."""

LEAVES = {
    *("weight", "weight_packed", "weight_shape", "scale", "input_scale", "input_global_scale"),
    *("bias", *SCALES, *REFUSED),
}

INSTEAD = {
    "gptq": "vLLM and SGLang repack GPTQ themselves",
    "awq": "vLLM and SGLang repack AWQ themselves",
    "bitsandbytes": "start from the unquantised checkpoint",
    "gguf": "use llama.cpp's own tools",
    "hqq": "start from the unquantised checkpoint",
    "auto-round": "export it as compressed-tensors or GPTQ",
    "intel/auto-round": "export it as compressed-tensors or GPTQ",
    "exl2": "use ExLlama's own tools",
    "exl3": "use ExLlama's own tools",
    **dict.fromkeys(
        ("aqlm", "bitnet", "eetq", "fp_quant", "higgs", "quanto", "spqr", "vptq"),
        "start from the unquantised checkpoint",
    ),
    "torchao": "start from the unquantised checkpoint",
    "quark": "AMD Quark is not read yet",
    "mxfp4": "gpt-oss MXFP4 is not read yet",
}
"""Methods that are not read here, and what to do instead."""


@dataclass(frozen=True)
class Problem:
    """Something that makes a module unusable: `where` it is, and what was found and wanted."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Module:
    """A weight with what belongs to it. `shape` is the logical `(N, K)`, () if it is no matrix."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    leaves: Mapping[str, TensorInfo]
    format: Format | None

    def leaf(self, name: str) -> TensorInfo:
        """The tensor of this leaf."""
        return self.leaves[name]

    @property
    def written(self) -> Format:
        """The format of a module that can be packed."""
        assert self.format is not None, f"{self.name} is {self.encoding}"
        return self.format

    @property
    def codes(self) -> TensorInfo:
        """The codes of a module that can be packed."""
        return self.leaves[self.written.codes]

    @property
    def scales(self) -> TensorInfo:
        """The block scales of a module that can be packed."""
        return self.leaves[self.written.scales]

    @property
    def global_scale(self) -> TensorInfo:
        """The global scale, as stored, of a module that can be packed."""
        return self.leaves[self.written.global_scale]


@dataclass(frozen=True)
class Recognised:
    """All modules by name, and what is wrong with the checkpoint."""

    modules: dict[str, Module]
    problems: tuple[Problem, ...]

    def require_sound(self) -> None:
        """Raise FormatError with the first problem, and how many more there are."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise FormatError(f"{self.problems[0]}{more}")


def recognise(checkpoint: Checkpoint) -> Recognised:
    """Every module of the checkpoint and every contradiction among its tensors."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    problems = list[Problem]()
    for name, info in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in LEAVES and module:
            parts.setdefault(module, {})[leaf] = info
        elif leaf in SCALES or leaf in REFUSED or leaf == "weight_packed":
            problems.append(Problem(str(info), "belongs to no module"))
        elif reason := _fused(info):
            problems.append(Problem(str(info), reason))
    modules = dict[str, Module]()
    for name, leaves in parts.items():
        try:
            module_ = _module(name, leaves)
        except FormatError as error:
            problems.append(Problem(name, str(error)))
        else:
            if module_:
                modules[name] = module_
    problems += _twins(modules)
    return Recognised(modules, tuple(problems))


def _twins(modules: Mapping[str, Module]) -> Iterator[Problem]:
    """Experts' projections under two names: `experts.1.`, `experts.01.`, w1 beside gate_proj."""
    seen: dict[tuple[str, int, str], str] = {}
    for name in modules:
        where = address(name)
        if where.expert is not None:
            part = where.projection or where.leaf
            first = seen.setdefault((where.parent, where.expert, part), name)
            if first != name:
                yield Problem(name, f"is {part} of expert {where.expert}, as {first} is")


def _fused(info: TensorInfo) -> str:
    if info.name.endswith("_blocks") and info.dtype == "U8":
        return "fused MXFP4 experts (gpt-oss) are not read yet"
    if len(info.shape) == 3 and info.dtype in ("U8", "I8", "F8_E4M3"):
        return "fused quantised experts are not read yet"
    return ""


def _module(name: str, leaves: dict[str, TensorInfo]) -> Module | None:
    if "qweight" in leaves:
        raise FormatError(f"qweight: {REFUSED['qweight']} is not read here")
    weight = leaves.get("weight_packed") or leaves.get("weight")
    if weight is None:
        if orphans := [leaf for leaf in SCALES if leaf in leaves]:
            raise FormatError(f"{orphans[0]} without a weight")
        return None
    if "weight_packed" in leaves and "weight" in leaves:
        raise FormatError("has both weight and weight_packed")
    if len(weight.shape) > 2 and weight.dtype in ("U8", "I8", "I32", "F8_E4M3"):
        raise FormatError(f"{weight}: fused quantised experts are not read yet")
    for format_ in formats():
        if _written_by(format_, leaves):
            if refused := [leaf for leaf in leaves if leaf in REFUSED]:
                raise FormatError(f"{refused[0]} cannot be packed: {REFUSED[refused[0]]}")
            return Module(name, *_nvfp4(format_, leaves), leaves, format_)
    return Module(name, *_other(leaves, weight), leaves, None)


def _written_by(format_: Format, leaves: Mapping[str, TensorInfo]) -> bool:
    codes, scales = leaves.get(format_.codes), leaves.get(format_.scales)
    if codes is None or codes.dtype != "U8":
        return False
    return format_.global_scale in leaves or (scales is not None and scales.dtype == "F8_E4M3")


def _nvfp4(format_: Format, leaves: Mapping[str, TensorInfo]) -> tuple[Encoding, tuple[int, int]]:
    for leaf in (format_.scales, format_.global_scale):
        if leaf not in leaves:
            raise FormatError(f"{leaf} is missing beside {format_.codes}")
    codes, scales = leaves[format_.codes], leaves[format_.scales]
    if len(codes.shape) != 2:
        raise FormatError(f"{codes}: wanted a matrix [N, K/2]")
    if not codes.nbytes:
        raise FormatError(f"{codes}: has no elements")
    if scales.dtype != "F8_E4M3":
        raise FormatError(f"{scales}: wanted F8_E4M3")
    n, k = codes.shape[0], codes.shape[1] * 2
    for leaf in (format_.global_scale, format_.input_scale):
        if leaf in leaves and (leaves[leaf].dtype != "F32" or leaves[leaf].nbytes != 4):
            raise FormatError(f"{leaves[leaf]}: wanted one F32")
    if scales.shape == (n, k // 16) and k % 16 == 0:
        return Encoding.NVFP4, (n, k)
    if scales.shape == (n, k // 32) and k % 32 == 0:
        return Encoding.NVFP4_32, (n, k)
    raise FormatError(
        f"{format_.scales} is {list(scales.shape)}, wanted {[n, k // 16]} "
        f"(K = {k}, one scale per 16)"
    )


def _other(
    leaves: Mapping[str, TensorInfo], weight: TensorInfo
) -> tuple[Encoding, tuple[int, ...]]:
    """The encoding of a module that is not packed here: carried byte for byte."""
    scale = next(
        (leaves[s] for s in ("weight_scale", "weight_scale_inv", "scale") if s in leaves), None
    )
    quantised = weight.dtype in ("U8", "I8", "I32", "F8_E4M3")
    if not quantised:
        if any(leaf in leaves for leaf in SCALES):
            raise FormatError(f"{weight} is not quantised, but has a {scale or 'second scale'}")
        return Encoding.UNQUANTISED, weight.shape
    if scale is None:
        raise FormatError(f"{weight} has no scale")
    if weight.dtype == "I32" and "weight_shape" in leaves:
        return Encoding.INT4, ()  # K is in the data of weight_shape
    if len(weight.shape) != 2:
        raise FormatError(f"{weight}: wanted a matrix")
    n, k = weight.shape
    if weight.dtype in ("U8", "I8") and scale.dtype in ("U8", "F8_E8M0"):
        return Encoding.MXFP4, _blocks_of_32(scale, n, 2 * k)
    if weight.dtype != "F8_E4M3":
        raise FormatError(f"{weight} with {scale}: no encoding known here")
    if scale.dtype == "U8":
        return Encoding.MXFP8, _blocks_of_32(scale, n, k)
    if scale.shape in ((), (1,)):
        return Encoding.FP8_TENSOR, (n, k)
    if scale.shape in ((n,), (n, 1)) and n > 1:
        return Encoding.FP8_CHANNEL, (n, k)
    blocks = scale.shape[::2] if scale.shape[1::2] == (1, 1) else scale.shape
    if len(blocks) != 2 or not (_cut(n, blocks[0]) and _cut(k, blocks[1])):
        raise FormatError(f"{scale}: wanted one for each block of {[n, k]}")
    return Encoding.FP8_BLOCK, (n, k)


def _cut(size: int, parts: int) -> bool:
    """Whether an axis has so many blocks of equal size, the last one perhaps shorter."""
    return parts == size or (parts > 0 and -(-size // -(-size // parts)) == parts)


def _blocks_of_32(scale: TensorInfo, n: int, k: int) -> tuple[int, int]:
    if k % 32 or scale.shape != (n, k // 32):
        raise FormatError(f"{scale}: wanted {[n, k // 32]} (K = {k}, one scale per 32)")
    return n, k


def quantization(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """The config that describes the quantisation, and where it stands; ({}, "") if none does."""
    places = (
        (checkpoint.config.get("quantization_config"), "config.json"),
        (checkpoint.text_config.get("quantization_config"), "config.json (text_config)"),
        (checkpoint.config.get("compression_config"), "config.json (compression_config)"),
        (checkpoint.hf_quant_config, "hf_quant_config.json"),
    )
    return next(((c, where) for c, where in places if isinstance(c, dict) and c), ({}, ""))


def require_nvfp4(checkpoint: Checkpoint, recognised: Recognised) -> None:
    """Raise FormatError, naming the method or what was found, unless NVFP4 modules are there."""
    found = Counter(m.encoding for m in recognised.modules.values())
    method = str(quantization(checkpoint)[0].get("quant_method") or "").lower()
    if method in INSTEAD and (
        recognised.problems or not found[Encoding.NVFP4] or method == "quark"
    ):
        first = f" ({recognised.problems[0].where})" if recognised.problems else ""
        raise FormatError(f"quant_method {method!r} is not read here{first}: {INSTEAD[method]}")
    recognised.require_sound()
    if found[Encoding.NVFP4]:
        return
    kinds = ", ".join(f"{count} {encoding}" for encoding, count in sorted(found.items()))
    said = f" (quant_method {method!r})" if method else ""
    raise FormatError(
        f"no NVFP4 module in the checkpoint{said}; found {kinds or 'no weights'}: "
        "only NVFP4 can be packed yet"
    )


def disagreements(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[str]:
    """Where the config says something else than the tensors; the tensors are believed."""
    config, where = quantization(checkpoint)
    used = {m.format.name: m.format for m in modules.values() if m.format}
    if not config:
        if used:
            yield f"no quantization config, but the tensors are {', '.join(sorted(used))}"
        return
    for name, format_ in sorted(used.items()):
        if not format_.claims(config):
            method = config.get("quant_method")
            yield f"{where} says quant_method {method!r}, the tensors are {name}"
    algorithm = str(config.get("quant_algo") or "").upper()
    if used and algorithm and not any(word in algorithm for word in ("NVFP4", "MIXED")):
        yield f"{where} says quant_algo {algorithm}, the tensors are {', '.join(sorted(used))}"
    ignored = config.get("ignore")
    names = [n for n in ignored if isinstance(n, str)] if isinstance(ignored, list) else []
    packed = [name for name in names if _quantised(modules.get(name))]
    if packed:
        yield f"{where} ignores {len(packed)} modules that are quantised, {packed[0]} among them"


def _quantised(module: Module | None) -> bool:
    return module is not None and module.encoding is not Encoding.UNQUANTISED
