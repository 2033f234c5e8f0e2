"""How fast vLLM loads a packed folder, against the ModelOpt checkpoint that it was packed from.

    python scripts/bench_vllm.py [--layers 48] [--experts 128] [--runs 2] [--cold] WORK_FOLDER

Makes a checkpoint of Qwen3-30B-A3B's shapes in ModelOpt's naming (random NVFP4 experts, BF16 rest),
converts it, loads both with vLLM, each run in a process of its own, and prints a table. Times are
those that vLLM logs, of its runner's whole `load_model`, and of the whole `LLM()`; memory is the
GPU allocator's and this process' (without pages of mapped files). Files are in the page cache
unless `--cold` asks to drop them first. Both must leave the same bytes in every expert's tensors,
which digests tell: tokens do not, since vLLM's own runs differ where random weights tie.
`--control SRC DST` converts SRC with two factors of the weights' order swapped, which is garbage
that only serving it can tell. Wants a GPU, vLLM with the plug-in installed, and 40 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
ARGUMENTS = {
    "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256,
    "gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 1 << 30,
    "attention_backend": "TRITON_ATTN",
}  # fmt: skip
SWAPPED = "nt w:4 h:2 c:8, kt g:2 q:4 e:2 -> kt, nt c w q e h g"
"""Marlin's order of 4-bit codes (kernels/marlin.py, CODES4) with q and w the wrong way round."""


def config(o: argparse.Namespace) -> dict[str, Any]:
    """config.json of the model, quantised as ModelOpt says it."""
    left = [f"model.layers.{i}.{m}" for i in range(o.layers) for m in ("self_attn*", "mlp.gate")]
    quantization = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
        "kv_cache_scheme": None, "producer": {"name": "modelopt", "version": "0.47.0"},
        "ignore": ["lm_head", *left],
    }  # fmt: skip
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": o.hidden, "intermediate_size": o.inner, "moe_intermediate_size": o.inner,
        "num_hidden_layers": o.layers, "num_attention_heads": o.heads, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": o.experts, "num_experts_per_tok": min(8, o.experts),
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": o.vocab, "max_position_embeddings": 4096, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "quantization_config": quantization,
    }  # fmt: skip


def normal(*shape: int) -> Tensor:
    """A BF16 matrix as initialisers make it."""
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) * 0.02


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer(o: argparse.Namespace, i: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer."""
    at, h = f"model.layers.{i}.", o.hidden
    yield at + "input_layernorm.weight", torch.ones(h, dtype=torch.bfloat16)
    yield at + "post_attention_layernorm.weight", torch.ones(h, dtype=torch.bfloat16)
    for leaf, n in (("q", o.heads), ("k", 4), ("v", 4)):
        yield f"{at}self_attn.{leaf}_proj.weight", normal(n * 128, h)
    for leaf in ("q_norm", "k_norm"):
        yield f"{at}self_attn.{leaf}.weight", torch.ones(128, dtype=torch.bfloat16)
    yield at + "self_attn.o_proj.weight", normal(h, o.heads * 128)
    yield at + "mlp.gate.weight", normal(o.experts, h)
    factors = torch.rand(o.experts, 2) * 0.004 + 0.008
    for leaf, n, k in (("gate", o.inner, h), ("up", o.inner, h), ("down", h, o.inner)):
        codes = torch.randint(256, (o.experts, n, k // 2), dtype=torch.uint8, device=DEVICE).cpu()
        scales = torch.randint(
            0x30, 0x40, (o.experts, n, k // 16), dtype=torch.uint8, device=DEVICE
        ).cpu()
        for e in range(o.experts):
            stem = f"{at}mlp.experts.{e}.{leaf}_proj."
            yield stem + "weight", codes[e]
            yield stem + "weight_scale", scales[e].view(torch.float8_e4m3fn)
            yield stem + "weight_scale_2", factors[e, int(leaf == "down")]
            yield stem + "input_scale", torch.tensor(0.01)


def make(o: argparse.Namespace, path: Path) -> None:
    """Write the checkpoint, a shard for each layer."""
    path.mkdir(parents=True)
    torch.manual_seed(0)
    named, total = dict[str, str](), 0

    def write(name: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, path / name, {"format": "pt"})

    with ThreadPoolExecutor(6) as pool:
        for i in range(o.layers + 1):
            if i < o.layers:
                tensors = {name: t.cpu().clone() for name, t in layer(o, i)}
            else:
                tensors = {
                    "model.embed_tokens.weight": normal(o.vocab, o.hidden).cpu(),
                    "lm_head.weight": normal(o.vocab, o.hidden).cpu(),
                    "model.norm.weight": torch.ones(o.hidden, dtype=torch.bfloat16),
                }
            file = f"model-{i + 1:05}-of-{o.layers + 1:05}.safetensors"
            named |= dict.fromkeys(tensors, file)
            total += sum(t.nbytes for t in tensors.values())
            pool.submit(write, file, tensors)
    index = {"metadata": {"total_size": total}, "weight_map": named}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config(o), indent=1))


def control(source: Path, target: Path) -> None:
    """Convert with two factors of the weights' order swapped; packing and verify agree on it."""
    from transcode import catalog
    from transcode.cli import main as command
    from transcode.kernels import marlin
    from transcode.tiling import Tiling

    wrong = replace(marlin.NVFP4, codes=marlin.codes_of(Tiling(SWAPPED), 4))
    catalog.layouts()["marlin-nvfp4"] = (wrong,)
    command(["convert", "--to", "marlin-nvfp4", str(source), str(target)], standalone_mode=False)


def anonymous() -> int:
    """This process' memory without files' pages, in bytes; pinned buffers are in it."""
    found = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return (int(found["RssAnon"]) + int(found["RssShmem"])) << 10


def digests(model: torch.nn.Module) -> dict[str, int]:
    """Of every expert tensor's bytes and their order: 32-bit words times odd numbers, added up."""
    found = dict[str, int]()
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf.startswith(("w13_weight", "w2_weight")):
            words = parameter.data.contiguous().view(-1).view(torch.uint8).view(torch.int32)
            odd = torch.arange(1, 2 * len(words), 2, dtype=torch.int32, device=words.device)
            found[name] = int((words * odd).sum(dtype=torch.int64))
    return found


def serve(folder: str, output: str) -> None:
    """Load the folder, measure, and save what came out."""
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found: dict[str, Any] = {}
    load = GPUModelRunner.load_model

    def measured(*args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, over = torch.cuda.memory_allocated(), Event()
        host = [anonymous()]

        def watch() -> None:
            while not over.wait(0.02):
                host.append(anonymous())

        thread = Thread(target=watch)
        thread.start()
        started = perf_counter()
        load(*args, **kwargs)
        torch.cuda.synchronize()
        found["load_model"] = perf_counter() - started
        over.set()
        thread.join()
        found["final"] = torch.cuda.memory_allocated() - before
        found["peak"] = torch.cuda.max_memory_allocated() - before
        found["reserved"] = torch.cuda.max_memory_reserved()
        found["host"] = max(host) - host[0]
        found["digests"] = digests(args[0].model)

    GPUModelRunner.load_model = measured
    started = perf_counter()
    llm = LLM(folder, **ARGUMENTS)
    found["llm"] = perf_counter() - started
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for i in range(16)]} for j in range(4)]
    results = [result.outputs[0] for result in llm.generate(prompts, sampling)]
    found["tokens"] = [list(r.token_ids) for r in results]
    Path(output).write_text(json.dumps(found))


def warm(folder: Path, cold: bool) -> None:
    """Bring all files into the page cache, or out of it."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            if cold:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while stream.read(64 << 20):
                    pass


def child(folder: Path, cold: bool, log: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    warm(folder, cold)
    output = log.with_suffix(".json")
    output.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--serve", str(folder), str(output)]
    with log.open("w") as stream:
        subprocess.run(command, stdout=stream, stderr=stream, env=os.environ | SETTINGS)
    text = log.read_text(errors="replace")
    if not output.exists():
        raise SystemExit(f"{folder}: see {log}: {text.splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(output.read_text())
    found["dense"] = float(*re.findall(r"Loading weights took ([\d.]+) seconds", text)[:1])
    found["loading"] = float(*re.findall(r"Model loading took .* ([\d.]+) seconds", text)[:1])
    return found


def table(runs: dict[str, list[dict[str, Any]]], sizes: dict[str, Any]) -> None:
    """Print what was measured, and the best run against the best."""
    rows = {
        "model loading, s": "loading", "of that, the loader's loop over tensors, s": "dense",
        "the runner's load_model in all, s": "load_model",
        "LLM() in all, s": "llm", "GPU memory of the model, GB": "final",
        "peak of it while loading, GB": "peak", "host memory while loading, GB": "host",
    }  # fmt: skip
    print("| | " + " | ".join(runs) + " |\n|---|" + "---|" * len(runs))
    for title, key in rows.items():
        scale = 1e9 if title.endswith("GB") else 1.0
        cells = [
            ", ".join(f"{r.get(key, 0) / scale:.2f}" for r in found) for found in runs.values()
        ]
        print(f"| {title} | " + " | ".join(cells) + " |")
    for title, values in sizes.items():
        print(f"| {title} | " + " | ".join(str(values.get(name, "")) for name in runs) + " |")
    if all(runs.values()):
        best = {n: min(r["loading"] for r in runs[n]) for n in ("stock", "packed")}
        last = runs["packed"][-1]
        print(f"\nmodel loading {best['stock'] / best['packed']:.1f} times faster; peak GPU memory "
              f"{last['peak'] / last['final']:.3f} x final")  # fmt: skip
        compare(runs["stock"][-1], last)


def compare(stock: dict[str, Any], packed: dict[str, Any]) -> None:
    """Whether the same bytes lie in every tensor of the experts."""
    ours, theirs = packed["digests"], stock["digests"]
    same = sum(ours.get(name) == value for name, value in theirs.items())
    firsts = sum(a[0] == b[0] for a, b in zip(stock["tokens"], packed["tokens"], strict=True))
    print(f"{same} of {len(theirs)} tensors of experts equal (packed has {len(ours)}); "
          f"the first tokens of {firsts} of {len(stock['tokens'])} completions")  # fmt: skip


def main() -> None:
    """Make, convert, load, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where everything is made, 40 GB")
    for name, default in (("layers", 48), ("experts", 128), ("hidden", 2048), ("inner", 768),
                          ("heads", 32), ("vocab", 151936), ("runs", 2)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cold", action="store_true", help="one more run each, files not cached")
    parser.add_argument("--no-load", action="store_true", help="make and convert only")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--control", nargs=2, type=Path, metavar=("SRC", "DST"))
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.serve:
        serve(*o.serve)
    elif o.control:
        control(*o.control)
    else:
        bench(o)


def bench(o: argparse.Namespace) -> None:
    """Make and convert what is not there yet, load both, print the table."""
    paths = {"stock": o.folder / "source", "packed": o.folder / "packed"}
    sizes: dict[str, Any] = {
        "made in, s": {},
        "converted in, s": {},
        "files, GB": {},
        "tensors": {},
    }
    started = perf_counter()
    if not paths["stock"].exists():
        make(o, paths["stock"])
    sizes["made in, s"]["stock"] = f"{perf_counter() - started:.1f}"
    started = perf_counter()
    if not paths["packed"].exists():
        words = ["convert", "--to", "marlin-nvfp4", *map(str, paths.values())]
        subprocess.run([sys.executable, "-m", "transcode", *words], check=True, stdout=sys.stderr)
    sizes["converted in, s"]["packed"] = f"{perf_counter() - started:.1f}"
    for name, path in paths.items():
        files = [*path.glob("*.safetensors")]
        sizes["files, GB"][name] = f"{sum(f.stat().st_size for f in files) / 1e9:.2f}"
        maps = [json.loads(f.read_text())["weight_map"] for f in path.glob("*.index.json")]
        sizes["tensors"][name] = sum(map(len, maps))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in paths}
    for cold in (False, True)[: 1 + o.cold] if not o.no_load else ():
        for run in range(1 if cold else o.runs):
            for name, path in paths.items():
                title = name + " cold" * cold
                found = child(path, cold, o.folder / f"{title.replace(' ', '-')}-{run}.log")
                runs.setdefault(title, []).append(found)
                print(f"{title} {run}: {found['loading']:.2f} s", file=sys.stderr, flush=True)
    table(runs, sizes)
    if o.json:
        o.json.write_text(json.dumps({"runs": runs, "sizes": sizes}) + "\n")


if __name__ == "__main__":
    main()
