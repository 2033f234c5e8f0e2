"""Let vLLM's own classes load packed folders on the CPU, and compare every parameter's bytes.

vLLM's files decide, as they lie in its wheel: the plug-in is registered with them, they make the
model, narrow the dense tensors and give out experts, for each rank of `--tp` (and `--ep`) in a
process of its own. What every rank must hold is cut out of the folder's tensors here, in other
words than the plug-in's. Kernels are not run. Environment and stand-ins: see loads.py.

    python scripts/vllm_packed.py --vllm UNPACKED_WHEEL [--tp 2] [--ep] [--redundant 2] FOLDER ...

Exit code 0: all bytes are where they belong, 3: some are not, or vLLM refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import loads
import torch
from safetensors import safe_open
from torch import Tensor

PORT = 29655
GLOO = "vllm.distributed.device_communicators.base_device_communicator"
"""Where the communicator is that needs no GPU."""


def tensors_of(folder: Path, index: str) -> dict[str, Tensor]:
    """All tensors that an index of the folder names."""
    named = json.loads((folder / index).read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for file in sorted(set(named.values())):
        with safe_open(folder / file, "pt") as opened:
            found |= {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
    return found


def made(options: argparse.Namespace, folder: Path, on: ExitStack) -> Any:
    """vLLM's model of a packed folder for this rank, loaded as vLLM's loader does it."""
    from functools import partial
    from types import SimpleNamespace

    for kind in (SimpleNamespace, partial(loads.StandIn, "operators")):
        torch.ops._C, torch.ops._moe_C = kind(), kind()
        from vllm import _custom_ops, platforms  # noqa: F401
    from vllm.platforms import cuda

    answers = {"get_device_capability": cuda.DeviceCapability(9, 0)}
    answers |= {"get_device_name": "stand-in", "num_compute_units": 132}
    answers |= {
        "device_count": options.tp,
        "get_device_communicator_cls": f"{GLOO}.DeviceCommunicatorBase",
    }
    methods = {name: classmethod(lambda *_, a=a, **__: a) for name, a in answers.items()}
    platforms._current_platform = type("Gpu", (cuda.NonNvmlCudaPlatform,), methods)()
    from transcode.vllm import register

    register()
    register()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
    words = EngineArgs(
        str(folder), max_model_len=64, enforce_eager=True, skip_tokenizer_init=True,
        tensor_parallel_size=options.tp, enable_expert_parallel=options.ep,
        enable_eplb=bool(options.redundant),
        eplb_config={"num_redundant_experts": options.redundant},
        **options.llm,
    )  # fmt: skip
    config = words.create_engine_config()
    config.device_config.device = torch.device("cpu")
    on.enter_context(set_current_vllm_config(config))
    store = f"tcp://127.0.0.1:{PORT}"
    init_distributed_environment(options.tp, options.rank, store, options.rank, "gloo")
    initialize_model_parallel(options.tp, 1)
    torch.set_default_dtype(config.model_config.dtype)
    model = initialize_model(config)
    dense = tensors_of(folder, "model.safetensors.index.json")
    model.load_weights(iter(dense.items()))
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model, dense


def halves(t: Tensor, count: int, options: argparse.Namespace) -> Tensor:
    """This rank's columns of each of `count` equal blocks of columns."""
    blocks = [block.chunk(options.tp, -1)[options.rank] for block in t.chunk(count, -1)]
    return torch.cat(blocks, -1)


def wanted_experts(
    container: str, fused: dict[str, Tensor], size: dict[str, Any], options: argparse.Namespace
) -> dict[str, Tensor]:
    """What this rank must hold of a layer's fused tensors."""
    found: dict[str, Tensor] = {}
    logical = size["experts"]
    slots = [*range(logical), *(i % logical for i in range(options.redundant))]
    each = len(slots) // options.tp
    mine = slots[options.rank * each : (options.rank + 1) * each] if options.ep else slots
    gated = 1 if size["order"] == "interleaved" else len(size["members"])
    for name, tensor in fused.items():
        stem, _, leaf = name.rpartition(".")
        if stem != container or "source_" in leaf:
            continue
        t = tensor[mine]
        if not options.ep and leaf.startswith("w13_") and t.dim() > 1:
            t = halves(t, gated, options)
        if not options.ep and leaf in ("w2_weight", "w2_weight_scale") and t.shape[1] > 1:
            t = t.chunk(options.tp, 1)[options.rank]
        if not options.ep and leaf == "w2_bias" and options.rank:
            t = torch.zeros_like(t)
        found[leaf] = t
    return found


def wanted_dense(
    name: str, size: dict[str, Any], dense: dict[str, Tensor], options: argparse.Namespace
) -> dict[str, Tensor]:
    """What this rank must hold of a packed linear, or of several that are joined."""
    parent = name.rpartition(".")[0]
    members = [f"{parent}.{leaf}." for leaf in size["members"]]
    by_rows = size["members"][0] in ("o_proj", "down_proj")
    found: dict[str, Tensor] = {}
    for leaf in ("weight", "weight_scale", "bias"):
        parts = [dense[member + leaf] for member in members if member + leaf in dense]
        if by_rows and leaf != "bias" and parts[0].shape[0] > 1:
            parts = [part.chunk(options.tp, 0)[options.rank] for part in parts]
        elif not by_rows:
            parts = [part.chunk(options.tp, -1)[options.rank] for part in parts]
        if parts:
            found[leaf] = torch.cat(parts, -1)
    if members[0] + "weight_global_scale" in dense:
        found["weight_global_scale"] = dense[members[0] + "weight_global_scale"]
    return found


def faults(model: Any, dense: dict[str, Tensor], folder: Path, options: argparse.Namespace) -> Any:
    """Every parameter whose bytes are not the folder's, and a count of those that are."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    sizes = {name: size | {"order": config["w13_order"]} for name, size in config["sizes"].items()}
    fused = tensors_of(folder, "transcode.index.json")
    found, equal = list[str](), 0
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method == "PackedExperts":
            container = module.quant_method.name
            wanted = wanted_experts(container, fused, sizes[f"{container}.w13"], options)
        elif method == "PackedLinear":
            stack = module.quant_method.stack.name
            wanted = wanted_dense(stack, sizes[stack], dense, options)
        else:
            continue
        held = dict(module.named_parameters(recurse=False))
        if method == "PackedExperts" and module.quant_method.biased_factor:
            held.pop("w2_bias"), wanted.pop("w2_bias")
        for leaf in held.keys() | wanted.keys():
            a, b = held.get(leaf), wanted.get(leaf)
            if (
                a is None
                or b is None
                or a.numel() != b.numel()
                or not torch.equal(
                    a.data.contiguous().view(-1).view(torch.uint8),
                    b.contiguous().view(-1).view(torch.uint8),
                )
            ):
                got, want = (None if t is None else [*t.shape] for t in (a, b))
                found.append(f"{name}.{leaf}: {got}, wanted {want} and these bytes")
            else:
                equal += 1
    return found, equal


def main() -> int:
    """Run every rank of every folder; 0 if all bytes are where they belong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", type=Path, required=True, help="folder of an unpacked wheel")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true", help="experts by rank, not cut")
    parser.add_argument("--redundant", type=int, default=0, help="redundant experts, by EPLB")
    parser.add_argument("--llm", type=json.loads, default={}, help="more EngineArgs, as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, nargs="+")
    options = parser.parse_args()
    if options.rank is None:
        worst = 0
        for folder in options.folder:
            words = [w for w in sys.argv[1:] if w not in map(str, options.folder)]
            ranks = [
                subprocess.Popen([sys.executable, __file__, *words, f"--rank={r}", str(folder)])
                for r in range(options.tp)
            ]
            worst = max([worst, *(rank.wait() for rank in ranks)])
        return worst
    wheel = options.vllm.resolve()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    torch.cuda.Stream = torch.cuda.Event = type("Stream", (), {"__init__": lambda *_, **__: None})
    sys.path[:0] = [str(wheel), str(Path(__file__).parents[1])]
    loads.Missing.libraries = loads.LIBRARIES["vllm"]
    sys.meta_path.insert(0, loads.Missing())
    (info,) = wheel.glob("vllm-*.dist-info")
    [folder] = options.folder
    with loads.Watch(), ExitStack() as on:
        model, dense = made(options, folder.resolve(), on)
        found, equal = faults(model, dense, folder, options)
    how = f"tp {options.tp}{' ep' * options.ep}, redundant {options.redundant}, rank {options.rank}"
    told = "\n".join(f"  FAULT: {fault}" for fault in found) or f"  {equal} parameters equal"
    print(f"{info.stem.replace('-', ' ')}: {folder.name}: {how}\n{told}", flush=True)
    return 3 if found else 0


if __name__ == "__main__":
    sys.exit(main())
