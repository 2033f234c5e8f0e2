#!/usr/bin/env python3
"""Reads a checkpoint with another project's own code and prints, as JSON, what that found.

Runs in an environment of scripts/peers and imports nothing of this project:
    .peers/ct20/bin/python scripts/peers_judge.py FOLDER --peer ct
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PACKAGES = ("amd-quark", "compressed-tensors", "nvidia-modelopt", "torch", "transformers")
FP4_GROUP = {"NVFP4": 16, "W4A16_NVFP4": 16, "NVFP4_AWQ": 16, "W4A8_NVFP4_FP8": 32}
Tensors = dict[str, torch.Tensor]
Found = tuple[Tensors, list[str]]  # weights by module in float32, what the reader objects to


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 over dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def quant_of(folder: Path) -> dict[str, Any]:
    """What config.json says of the quantisation."""
    return json.loads((folder / "config.json").read_text()).get("quantization_config") or {}


def by_module(tensors: Tensors) -> dict[str, Tensors]:
    """The tensors by module, then by the last part of their names."""
    modules: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    return modules


def skeleton(modules: dict[str, Tensors]) -> torch.nn.Module:
    """A tree without data: a Linear (or Embedding) for each matrix, under the file's own names."""
    # A model of transformers would not do: there, experts and routers are no Linears.
    root = torch.nn.Module()
    for path, parts in modules.items():
        weight = parts.get("weight_packed", parts.get("weight"))
        if weight is None or weight.ndim != 2:
            continue
        at, (*parents, leaf) = root, path.split(".")
        for parent in parents:
            at = at._modules.setdefault(parent, torch.nn.Module())  # type: ignore[assignment]
        rows, columns = weight.shape[0], weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
        with torch.device("meta"):
            linear = torch.nn.Linear(columns, rows, bias="bias" in parts)
            embedding = torch.nn.Embedding(rows, columns)
        at.add_module(leaf, embedding if "embed" in leaf else linear)
    return root.bfloat16()


def differing(path: str, expected: Tensors, found: Tensors) -> Iterator[str]:
    """How a module's tensors differ from those that its reader makes room for."""
    for leaf in sorted(expected.keys() | found.keys()):
        want, have = expected.get(leaf), found.get(leaf)
        if want is None or have is None:
            yield f"{path}.{leaf}: {'not expected' if want is None else 'not in the file'}"
        elif want.shape != have.shape or (want.itemsize == 1 and want.dtype != have.dtype):
            yield f"{path}.{leaf}: {have.dtype} {[*have.shape]}, not {want.dtype} {[*want.shape]}"


def decode_fp4_in_float32() -> None:
    """compressed-tensors decodes FP4 in bfloat16, and rounds, unless told otherwise."""
    nvfp4: Any = import_module("compressed_tensors.compressors.nvfp4.base")
    nvfp4.unpack_fp4_from_uint8.__defaults__ = (torch.float32,)


def judge_ct(_: Path, quant: dict[str, Any], tensors: Tensors) -> Found:
    """compressed-tensors: its schema, its matching, its layout of the tensors, its decompress."""
    decode_fp4_in_float32()
    quantization = import_module("compressed_tensors.quantization")
    compressors = import_module("compressed_tensors.compressors")
    parsed, modules = quantization.QuantizationConfig.model_validate(quant), by_module(tensors)
    root, decoded, problems = skeleton(modules), {}, []
    quantization.apply_quantization_config(root, parsed)
    compressors.ModelCompressor(quantization_config=parsed).compress_model(root)
    for path, module in root.named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        parts = modules.pop(path)
        wrong = list(differing(path, module.state_dict(), parts))
        problems += wrong
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or any("not in the file" in line for line in wrong):
            continue
        reader = compressors.BaseCompressor.get_value_from_registry(scheme.format.value)
        try:
            if parts["weight_scale"].dtype == torch.bfloat16:
                parts["weight_scale"] = parts["weight_scale"].float()
            decoded[path] = reader.decompress(parts, scheme)["weight"].float()
        except Exception as error:
            problems.append(f"{path}: {type(error).__name__}: {error}")
    orphans = (f"{p}.{leaf}" for p in modules for leaf in modules[p] if leaf.startswith("weight_"))
    return decoded, [*problems, *(f"{name}: of no module" for name in orphans)]


def judge_modelopt(folder: Path, quant: dict[str, Any], tensors: Tensors) -> Found:
    """ModelOpt: the QTensor class for quant_algo, for the modules that its config names."""
    classes = import_module("modelopt.torch.quantization.qtensor")
    decoded, problems = {}, []
    if (file := folder / "hf_quant_config.json").exists():
        older = json.loads(file.read_text())["quantization"]
        older["ignore"] = older.get("exclude_modules", [])
        problems += [f"{k} is not in both" for k in quant.keys() & older if quant[k] != older[k]]
        quant = older | quant
    layers, ignored = quant.get("quantized_layers"), quant.get("ignore") or []
    for name, weight in tensors.items():
        if weight.ndim < 2 or name.endswith(("_scale", "_bias")):
            continue
        path, joint = name.removesuffix(".weight"), "." if name.endswith(".weight") else "_"
        scale = tensors.get(f"{path}{joint}weight_scale")
        algo = None if any(fnmatch(path, pattern) for pattern in ignored) else quant["quant_algo"]
        if layers:
            parents = (path.rsplit(".", n)[0] for n in range(path.count(".") + 1))
            algo = next((layers[p]["quant_algo"] for p in [path, *parents] if p in layers), None)
        if (scale is None) != (algo is None):
            problems.append(f"{path}: {algo} in the config, {weight.dtype} in the file")
        if scale is None or algo is None:
            continue
        algo = algo.upper()
        turned = weight.ndim == 3 and algo in FP4_GROUP  # fused experts, packed along the middle
        if turned:
            weight, scale = (t.transpose(-1, -2).contiguous() for t in (weight, scale))
        shape, options = weight.shape, {"scale": scale, "dtype": torch.float32}
        if algo in FP4_GROUP or "MXFP4" in algo:
            shape = torch.Size([*shape[:-1], shape[-1] * 2])
            options["block_sizes"] = {-1: FP4_GROUP.get(algo, 32)}
            options["double_scale"] = tensors.get(f"{path}{joint}weight_scale_2")
            kind = classes.NVFP4QTensor if algo in FP4_GROUP else classes.MXFP4QTensor
        else:
            kind = classes.MXFP8QTensor if algo == "MXFP8" else classes.FP8QTensor
            if algo in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):  # [N/128, 1, K/128, 1]
                options["block_sizes"] = {-1: 128, -2: 128}
                options["scale"] = scale.reshape(scale.shape[0], -1)
            elif algo == "FP8_PER_CHANNEL_PER_TOKEN":
                options["scale"] = scale.reshape(-1, 1)
        values = kind(shape, torch.float32, weight).dequantize(**options)
        decoded[path] = values.transpose(-1, -2).contiguous() if turned else values
    return decoded, problems


def judge_hf(_: Path, quant: dict[str, Any], tensors: Tensors) -> Found:
    """transformers: its decoders of block FP8, DeepSeek-V4 and gpt-oss."""
    decoded, problems = {}, []
    if quant.get("quant_method") == "mxfp4":
        convert = import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
        for path in (n.removesuffix("_blocks") for n in tensors if n.endswith("_blocks")):
            packed = tensors[f"{path}_blocks"], tensors[f"{path}_scales"]
            decoded[path] = convert(*packed, dtype=torch.float32)
        return decoded, []
    reader = import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    should = import_module("transformers.quantizers.quantizers_utils").should_convert_module
    for path, parts in by_module(tensors).items():
        weight, scale = parts.get("weight"), parts.get("weight_scale_inv", parts.get("scale"))
        if weight is None or weight.ndim < 2:
            continue
        if (scale is None) != (weight.itemsize > 1):
            problems.append(f"{path}: {weight.dtype} with{'out' if scale is None else ''} a scale")
        elif scale is not None:
            decoded[path] = reader._dequantize_one(weight, scale, torch.float32)
            if not should(path, quant.get("modules_to_not_convert")):
                problems.append(f"{path}: the config excludes it, the file has a scale")
    return decoded, problems


def judge_quark(folder: Path, _: dict[str, Any], tensors: Tensors) -> Found:
    """Quark: its importer, which fills bare Linears, and the quantizer that it gives each."""
    modules, decoded, problems = by_module(tensors), {}, []
    load = import_module("quark.torch.export.api").import_model_from_safetensors
    for path, module in load(skeleton(modules), str(folder)).named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if ("weight_scale" in modules.get(path, {})) != (quantizer is not None):
            problems.append(f"{path}: quantised in the file or in the config alone")
        if quantizer is not None:
            decoded[path] = quantizer(module.weight.data).float()
    return decoded, problems


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What transformers' own model says, loaded from the folder in float32 on the CPU."""
    transformers = import_module("transformers")
    method = {"fp8": "FineGrainedFP8", "mxfp4": "Mxfp4", "compressed-tensors": "CompressedTensors"}
    options: dict[str, Any] = {"dtype": torch.float32}
    if kind := method.get(quant_of(folder).get("quant_method", "")):
        options["quantization_config"] = getattr(transformers, f"{kind}Config")(dequantize=True)
    decode_fp4_in_float32()
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options)
    with torch.no_grad():
        return model.eval()(ids.reshape(1, -1)).logits[0]  # type: ignore[no-any-return]


def compared(mine: Tensors, theirs: Tensors) -> dict[str, Any]:
    """How many weights are bit for bit another's, which are not, and how far apart those are."""
    both = {n: digest(mine[n]) == digest(theirs[n]) for n in mine.keys() & theirs}
    gaps = [(mine[n] / theirs[n] - 1).nan_to_num(0).abs().max() for n in both if not both[n]]
    rest = sorted(n for n in mine.keys() | theirs if not both.get(n))
    return {"equal": sum(both.values()), "not": rest, "relative": float(max(gaps, default=0))}


def main() -> None:
    """Judges one folder."""
    judges = {"ct": judge_ct, "mo": judge_modelopt, "hf": judge_hf, "quark": judge_quark}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", choices=judges, help="decode the weights with this one")
    parser.add_argument("--weights", type=Path, help="write the decoded weights to this file")
    parser.add_argument("--oracle", type=Path, help="weights.safetensors, logits.safetensors")
    parser.add_argument("--logits", action="store_true", help="run transformers; wants --oracle")
    parser.add_argument("--against", type=Path, help="another folder; are its logits equal?")
    args = parser.parse_args()
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    out, sys.stdout = sys.stdout, sys.stderr  # Quark logs to stdout
    files = args.folder.glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    versions = {d.name: d.version for d in distributions() if d.name in PACKAGES}
    checksum = digest(*(tensors[name] for name in sorted(tensors)))
    said: dict[str, Any] = {"peer": args.peer, "versions": versions, "tensors": checksum}
    if args.peer:
        decoded, said["problems"] = judges[args.peer](args.folder, quant_of(args.folder), tensors)
        said["modules"] = {n: f"{[*t.shape]} {digest(t)}" for n, t in sorted(decoded.items())}
        if args.weights:
            save_file({n: t.contiguous() for n, t in decoded.items()}, args.weights)
        if args.oracle:
            said["oracle"] = compared(decoded, load_file(args.oracle / "weights.safetensors"))
    if args.logits:
        oracle = load_file(args.oracle / "logits.safetensors")
        mine = logits(args.folder, oracle["input_ids"])
        said["logits"] = {"from_oracle": (mine - oracle["logits"]).abs().max().item()}
        if args.against:
            said["logits"]["equal"] = torch.equal(mine, logits(args.against, oracle["input_ids"]))
    print(json.dumps(said, indent=1), file=out)


if __name__ == "__main__":
    main()
