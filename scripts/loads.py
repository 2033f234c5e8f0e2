"""Ask vLLM's and SGLang's own code, on the CPU, whether they load a folder.

The runtime's own files decide, as they lie in its wheel: they read config.json, pick the config
class and each layer's method, make the model with that method's parameters, and send the folder's
tensors through its `load_weights`. What comes after (repacking, kernels) is not run. Stand-ins
replace compiled extensions, a few libraries for serving, and the GPU. Each write to a parameter is
watched: a tensor that is dropped without a word shows by the elements that were never written, a
copy that changes bytes (codes as numbers) by its dtypes.

In an environment of its own: torch's CPU build and what the METADATA of the wheels requires, but
not what holds CUDA code (flashinfer, sglang-kernel), what `LIBRARIES` names, or the runtimes:
    pip install torch==2.13.0 transformers==5.19.0 compressed-tensors==0.18.0 xgrammar==0.2.7 ...
    python scripts/loads.py --vllm UNPACKED_WHEEL --sglang UNPACKED_WHEEL FOLDER

Prints each module's method and parameters (numbers as `*`), tensors that nothing read, and faults.
Exit code 0: the runtimes load it, 3: one does not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

STORE = "tcp://127.0.0.1:0"
BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
COMPILED = re.compile(r"vllm\.(vllm_flash_attn\.)?_(\w+_)?[cC](_\w+)?$")
LIBRARIES = {
    "vllm": "llguidance mistral_common cv2 outlines_core lmformatenforcer mcp",
    "sglang": "sgl_kernel torchvision llguidance outlines mistral_common datasets modelscope "
    "kernels quack cutlass tilelang timm IPython torchao",
}
HAS_DEFAULT = re.compile(r"\.(k|v|q|prob)_(scale|zero_point)$|_bias$|_swizzled$")


class StandIn(ModuleType):
    """A module that is not there: any name asked of it exists, and does nothing."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        """Make up the attribute; the import system's own names stay absent."""
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Missing(MetaPathFinder, Loader):
    """Imports a stand-in for compiled extensions and for libraries that do not decide."""

    libraries = ""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Claim what is to be stood in for."""
        stood_in = COMPILED.match(name) or name.partition(".")[0] in self.libraries.split()
        return ModuleSpec(name, self, is_package=True) if stood_in else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute."""


def on_cpu(value: Any) -> Any:
    """A CUDA device's word as the CPU's, anything else as it is."""
    return "cpu" if isinstance(value, torch.device | str) and str(value)[:4] == "cuda" else value


class Watch(TorchFunctionMode):
    """Keeps tensors on the CPU, and the books of what is read, written and cast."""

    def __init__(self) -> None:
        self.masks: dict[int, Tensor] = {}  # of each storage: what was written
        self.names: dict[int, str] = {}
        self.read: set[int] = set()
        self.casts: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any function of torch, after noting which tensors it takes and where it writes."""
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.cuda:
            return args[0]
        if self.masks and name != "__get__":
            with torch._C.DisableTorchFunction():
                tensors = [arg for arg in args if isinstance(arg, Tensor)]
                self.read |= {t.untyped_storage().data_ptr() for t in tensors}
                if name in ("copy_", "fill_", "zero_", "__setitem__"):
                    self.write(tensors[0], tensors[-1], args[1] if name == "__setitem__" else ...)
        return func(*map(on_cpu, args), **{k: on_cpu(v) for k, v in (kwargs or {}).items()})

    def write(self, into: Tensor, source: Tensor, index: Any) -> None:
        """Note a write, if it is to a parameter."""
        mask = self.masks.get(into.untyped_storage().data_ptr())
        if mask is not None:
            mask.as_strided(into.size(), into.stride(), into.storage_offset())[index] = True
            e8m0 = source.dtype is torch.float8_e8m0fnu and into.dtype in BYTES
            if source.dtype is not into.dtype and (source.dtype in BYTES or e8m0):
                self.casts.add(f"{source.dtype} copied by value into {into.dtype}")

    def watch(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Keep books of a model's parameters and of the tensors that it is to load."""
        self.names = {t.untyped_storage().data_ptr(): n for n, t in tensors.items()}
        for p in model.parameters():
            written = torch.zeros(p.untyped_storage().nbytes() // p.itemsize, dtype=torch.bool)
            self.masks[p.untyped_storage().data_ptr()] = written

    def unwritten(self, model: nn.Module) -> Iterator[str]:
        """Parameters of which elements were never written, though the chosen method uses them."""
        for name, parameter in model.named_parameters():
            mask = self.masks.get(parameter.untyped_storage().data_ptr())
            owner = model.get_submodule(name.rpartition(".")[0])
            unused = weight_only(owner) and re.search(r"input(_global)?_scale$", name)
            if mask is not None and not (mask.all() or unused or HAS_DEFAULT.search(name)):
                yield f"{name} never written: {int((~mask).sum())} of {mask.numel()} elements"


def weight_only(module: nn.Module) -> bool:
    """Whether the chosen method leaves activations alone, so that no input scale is used."""
    parts = [getattr(module, name, None) for name in ("quant_method", "scheme")]
    specs = [part.spec for part in parts if hasattr(part, "spec")]
    words = [f"{type(part).__name__} {getattr(part, 'use_a16', '')}" for part in parts]
    return bool(re.search("A16|True", str(words))) or any(s.activation is None for s in specs)


def vllm_model(folder: Path, capability: tuple[int, int], on: ExitStack) -> tuple[Any, Any]:
    """vLLM's model of a folder and its quantisation config."""
    for kind in (SimpleNamespace, partial(StandIn, "operators")):  # it adds to those that it finds
        torch.ops._C, torch.ops._moe_C = kind(), kind()
        from vllm import _custom_ops, platforms  # noqa: F401
    from vllm.platforms import cuda

    answers = {"get_device_capability": cuda.DeviceCapability(*capability)}
    answers |= {"get_device_name": "stand-in", "num_compute_units": 132}
    methods = {name: classmethod(lambda *_, a=a, **__: a) for name, a in answers.items()}
    platforms._current_platform = type("Gpu", (cuda.NonNvmlCudaPlatform,), methods)()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # a subprocess would lack the stand-ins
    words = EngineArgs(str(folder), max_model_len=64, enforce_eager=True, skip_tokenizer_init=True)
    config = words.create_engine_config()
    on.enter_context(set_current_vllm_config(config))
    init_distributed_environment(1, 0, STORE, 0, "gloo")
    initialize_model_parallel(1, 1)
    torch.set_default_dtype(config.model_config.dtype)
    return initialize_model(config), config.quant_config


def sglang_model(folder: Path, capability: tuple[int, int], on: ExitStack) -> tuple[Any, Any]:
    """SGLang's model of a folder and its quantisation config."""
    gpu = MagicMock(major=capability[0], minor=capability[1], multi_processor_count=132)
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "set_device": None}
    answers |= {"get_device_capability": capability, "mem_get_info": (1 << 37, 1 << 37)}
    answers |= {"get_device_properties": gpu, "get_device_name": "stand-in"}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, a=answer, **__: a)
    torch.version.cuda = "13.0"
    from sglang.srt import distributed, runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(folder), device="cuda", skip_tokenizer_init=True)
    config, load = ModelConfig.from_server_args(arguments), LoadConfig()
    ranks = runtime_context.SpawnRanks(world_rank=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    distributed.init_distributed_environment(1, 0, STORE, 0, "gloo")
    distributed.initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    initialize_dp_attention(arguments)
    torch.set_default_dtype(config.dtype)
    quantisation = loader._get_quantization_config(config, load)
    return loader._initialize_model(config, load, quantisation), quantisation


def short(name: str) -> str:
    """A module's or tensor's name without its numbers."""
    return re.sub(r"[.][0-9]+", ".*", name)


def methods(model: nn.Module) -> Iterator[str]:
    """What the runtime chose for each module: method, scheme and parameters."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and "Attention" not in type(module).__name__:
            chosen = [type(p).__name__ for p in (method, getattr(module, "scheme", None)) if p]
            held = [f"{n} {str(p.dtype)[6:]}" for n, p in module.named_parameters(recurse=False)]
            yield f"  {short(name)}: {' '.join(chosen)} ({', '.join(held)})"


def asked(runtime: str, folder: Path, capability: tuple[int, int]) -> list[str]:
    """The faults that one runtime finds in a folder; prints what it chose."""
    watch = Watch()
    make = vllm_model if runtime == "vllm" else sglang_model
    with watch, ExitStack() as on:
        try:
            model, config = make(folder, capability, on)
            print(f"{type(model).__name__}, {type(config).__name__}")
            print(*dict.fromkeys(methods(model)), sep="\n")
            tensors: dict[str, Tensor] = {}
            for file in sorted(folder.glob("*.safetensors")):
                tensors |= load_file(file)
            watch.watch(model, tensors)
            model.load_weights(iter(tensors.items()))
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if runtime in f.filename]
            places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
            return [f"{type(error).__name__} at {places[-1:]}: {error}"]
        unread = [short(name) for key, name in watch.names.items() if key not in watch.read]
        print(*(f"  note: {name} was never read" for name in dict.fromkeys(unread)), sep="\n")
        return sorted(watch.casts) + list(watch.unwritten(model))


def main() -> int:
    """Ask each runtime that is given; 0 if all of them load the folder, else 3."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", type=Path, help="folder of an unpacked vLLM wheel")
    parser.add_argument("--sglang", type=Path, help="folder of an unpacked SGLang wheel")
    parser.add_argument("--capability", default="10.0", help="of the GPU that is claimed")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    given = [name for name in ("vllm", "sglang") if getattr(args, name)]
    if len(given) != 1:  # their stand-ins differ: one process each
        words = [sys.executable, __file__, str(args.folder), "--capability", args.capability]
        runs = [subprocess.run([*words, f"--{n}", str(getattr(args, n))]) for n in given]
        return max(run.returncode for run in runs) if runs else parser.error("no wheel is given")
    runtime, wheel = given[0], getattr(args, given[0]).resolve()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    torch.cuda.Stream = torch.cuda.Event = type("Stream", (), {"__init__": lambda *_, **__: None})
    from transformers.utils import import_utils  # its probes would take a stand-in for the library

    import_utils.is_torchvision_available = import_utils.is_torchvision_v2_available = lambda: False
    import_utils.is_torchvision_greater_or_equal = lambda *_, **__: False
    sys.path.insert(0, str(wheel))
    Missing.libraries = LIBRARIES[runtime]
    sys.meta_path.insert(0, Missing())
    (info,) = wheel.glob(f"{runtime}-*.dist-info")
    print(f"{info.stem.replace('-', ' ')}: {args.folder.name}: ", end="", flush=True)
    major, _, minor = args.capability.partition(".")
    faults = asked(runtime, args.folder.resolve(), (int(major), int(minor)))
    print("\n".join(f"  FAULT: {fault}" for fault in faults) or "  loads")
    return 3 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
