#!/usr/bin/env python3
"""FP8 tiles to BF16: this program beside compressed-tensors' `convert_checkpoint`.

    scripts/peers .peers ct20
    python scripts/bench_bf16.py --peer .peers/ct20/bin/python [--layers N] [--rounds N] [DIR]

Writes a checkpoint with the names of Qwen3-MoE and DeepSeek's FP8 (tiles of 128 x 128, float32
scales) to DIR, 0.9 GB a layer. Both convert it in processes of their own, in turns, with 1 and 2
workers (the peer) and 1 and 2 threads (both); the first results are compared byte for byte. `work`
is the conversion without imports, `whole` the process; the least of all rounds. This program
compiles its loop, proves what it wrote and waits for the disk (fsync) in that time, the peer not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

EXPERTS, HIDDEN, WIDTH = 32, 4096, 2304
SHARD = 9
"""Experts of a shard: 255 MB."""

PEER = """
import sys, torch, time
torch.set_num_threads(int(sys.argv[3]))
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint
start = time.perf_counter()
made = FP8BlockDequantizer.from_pretrained(sys.argv[1])
convert_checkpoint(sys.argv[1], sys.argv[2], made, max_workers=int(sys.argv[4]), device="cpu")
print("work", time.perf_counter() - start)
"""

OURS = """
import sys, torch, time
torch.set_num_threads(int(sys.argv[3]))
from transcode.cli import main
start = time.perf_counter()
try:
    main(["convert", "--to", "bf16", "--device", "cpu", sys.argv[1], sys.argv[2]])
finally:
    print("work", time.perf_counter() - start)
"""


def matrix(rows: int, columns: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal weights: E4M3 codes and the scales of their tiles."""
    value = torch.randn(rows, columns, generator=draw) * 0.02
    tiles = value.reshape(rows // 128, 128, columns // 128, 128)
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scale


def build(folder: Path, layers: int) -> None:
    """Write the checkpoint."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    places = dict[str, str]()

    def save(tensors: dict[str, Tensor]) -> None:
        file = f"model-{len({*places.values()}) + 1:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    save({
        "model.embed_tokens.weight": torch.zeros(256, HIDDEN, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(256, HIDDEN, dtype=torch.bfloat16),
    })  # fmt: skip
    for layer in range(layers):
        at = f"model.layers.{layer}.mlp"
        save({f"{at}.gate.weight": torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)})
        for first in range(0, EXPERTS, SHARD):
            tensors = dict[str, Tensor]()
            for expert in range(first, min(first + SHARD, EXPERTS)):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    shape = (HIDDEN, WIDTH) if name == "down_proj" else (WIDTH, HIDDEN)
                    codes, scales = matrix(*shape, draw)
                    tensors[f"{at}.experts.{expert}.{name}.weight"] = codes
                    tensors[f"{at}.experts.{expert}.{name}.weight_scale_inv"] = scales
            save(tensors)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "intermediate_size": WIDTH,
        "num_experts": EXPERTS, "num_experts_per_tok": 8, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 256,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def timed(python: str, script: str, *words: object) -> tuple[float, float]:
    """Seconds of the conversion and of the whole process; SystemExit where it fails."""
    start = perf_counter()
    command = [python, "-c", script, *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    whole = perf_counter() - start
    lines = [line for line in ran.stdout.splitlines() if line.startswith("work ")]
    if ran.returncode or not lines:
        raise SystemExit(f"{python}: exit {ran.returncode}\n{ran.stderr[-2000:]}")
    return float(lines[-1].split()[1]), whole


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint, in the order of their names."""
    places = dict[str, Path]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    for name in sorted(places):
        with safe_open(places[name], "pt") as file:
            yield name, file.get_tensor(name)


def require_same(ours: Path, theirs: Path) -> int:
    """How many tensors are byte for byte the same; SystemExit if any is not."""
    count = 0
    for mine, other in zip(tensors(ours), tensors(theirs), strict=True):
        if mine[0] != other[0] or mine[1].dtype != other[1].dtype:
            raise SystemExit(f"{mine[0]} {mine[1].dtype}: theirs is {other[0]} {other[1].dtype}")
        if not torch.equal(mine[1].view(torch.uint8), other[1].view(torch.uint8)):
            raise SystemExit(f"{mine[0]}: not the same bytes")
        count += 1
    return count


def main() -> None:
    """Parse the command line, build, run, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", required=True)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        place = Path(made)
        source = place / "source"
        build(source, given.layers)
        size = sum(p.stat().st_size for p in source.glob("*.safetensors")) / 1e9
        runs = [("peer", w, t) for w in (1, 2) for t in (1, 2)] + [("ours", 1, t) for t in (1, 2)]
        best = dict.fromkeys(runs, (float("inf"), float("inf")))
        for turn in range(given.rounds):
            for run in runs:
                who, workers, threads = run
                target = place / f"{who}-{'first' if not turn and threads == 1 else 'again'}"
                shutil.rmtree(target, ignore_errors=True)
                python, script = (given.peer, PEER) if who == "peer" else (sys.executable, OURS)
                took = timed(python, script, source, target, threads, workers)
                best[run] = tuple(map(min, best[run], took))  # type: ignore[assignment]
            if not turn:
                same = require_same(place / "ours-first", place / "peer-first")
                print(f"{size:.2f} GB of source; {same} tensors are the same, byte for byte")
    print(f"{'':28}{'work s':>8}{'whole s':>9}{'GB/s':>7}")
    for (who, workers, threads), (work, whole) in best.items():
        name = f"{who}, {workers} x {threads}"
        print(f"{name:28}{work:8.2f}{whole:9.2f}{size / work:7.2f}")
    for threads in (1, 2):
        theirs = [took for (who, _, t), took in best.items() if who == "peer" and t == threads]
        for i, what in enumerate(("work", "whole")):
            ratio = min(took[i] for took in theirs) / best["ours", 1, threads][i]
            print(f"{threads} threads, {what}: {ratio:.1f} times as fast")


if __name__ == "__main__":
    main()
