"""Lets the peers read what `convert` writes, and keeps their answers in tests/golden/peers.json.

usage: .venv/bin/python scripts/peers_answers.py CHECKPOINTS [PEERS]

CHECKPOINTS holds the real folders with their `oracle/`; PEERS the environments that scripts/peers
made (default .peers). Every answer goes with a digest of the tensors that were judged, so CI, which
has no peers, only converts again and compares digests (tests/test_peers.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

KEPT = Path("tests/golden/peers.json")

CT = [("ct17", "ct"), ("ct20", "ct")]
MO, HF, QUARK = [("mo", "mo")], [("ct20", "hf")], [("quark", "quark")]
LOGITS = ("--logits",)

CASES: list[tuple[str, str, list[tuple[str, str]], tuple[str, ...]]] = [
    ("modelopt_nvfp4_qwen3moe", "compressed-tensors-nvfp4", CT, ()),
    ("modelopt_nvfp4_qwen3moe", "compressed-tensors-nvfp4a16", CT, ()),
    ("modelopt_nvfp4_qwen3moe_zeros", "compressed-tensors", CT, ()),
    ("modelopt_nvfp4_llama", "compressed-tensors-nvfp4", CT, LOGITS),
    ("modelopt_nvfp4_llama4", "compressed-tensors-nvfp4", CT, ()),
    ("modelopt_mixed_fp8attn_nvfp4exp_qwen3moe", "compressed-tensors", CT, ()),
    ("pair_cast_mxfp4_to_nvfp4_gptoss", "compressed-tensors-nvfp4", CT, ()),
    ("quark_mxfp4_llama", "compressed-tensors-mxfp4", CT, LOGITS),
    ("hf_mxfp4_gptoss", "compressed-tensors-mxfp4", CT, ()),
    ("deepgemm_fp4fp8_dsv4", "compressed-tensors", CT, ()),
    ("modelopt_mxfp8_qwen3moe", "compressed-tensors-mxfp8", CT, ()),
    ("modelopt_fp8_llama", "compressed-tensors-fp8", CT, LOGITS),
    ("modelopt_fp8block_qwen3moe", "compressed-tensors-fp8-block", CT, ()),
    ("hf_fp8ops_qwen3moe", "compressed-tensors-fp8-block", CT, ()),
    ("ct_nvfp4_qwen3moe", "modelopt-nvfp4", MO, ()),
    ("ct_nvfp4_qwen3moe_sharded", "modelopt-nvfp4", MO, ()),
    ("ct_nvfp4_llama", "modelopt-nvfp4", MO, ()),
    ("modelopt_nvfp4_llama4", "modelopt-nvfp4", MO, ()),
    ("ct_mxfp4_qwen3moe", "modelopt-mxfp4", MO, ()),
    ("quark_mxfp4_llama", "modelopt-mxfp4", MO, ()),
    ("ct_fp8dynamic_qwen3moe", "modelopt-fp8-channel", MO, ()),
    ("hf_fp8ops_qwen3moe", "modelopt-fp8-block", MO, ()),
    ("modelopt_fp8block_qwen3moe", "deepseek-fp8", HF, LOGITS),
    ("deepgemm_fp4fp8_dsv4", "deepseek-v4", HF, LOGITS),
    ("hf_mxfp4_gptoss", "gpt-oss", HF, LOGITS),
    ("ct_mxfp4_qwen3moe", "bf16", HF, LOGITS),
    ("modelopt_mxfp8_qwen3moe", "bf16", HF, LOGITS),
    ("modelopt_nvfp4_qwen3moe", "bf16", HF, LOGITS),
    ("hf_fp8ops_qwen3moe", "bf16", HF, LOGITS),
    ("ct_mxfp4_qwen3moe", "quark-mxfp4", QUARK, ()),
    ("modelopt_fp8_llama", "quark-fp8", QUARK, ()),
    ("ct_fp8dynamic_qwen3moe", "quark-fp8", QUARK, ()),
    ("ct_mxfp4_qwen3moe", "compressed-tensors-mxfp8", CT, ()),
    ("ct_mxfp4_qwen3moe", "compressed-tensors-nvfp4a16", CT, ()),
    ("ct_mxfp4_qwen3moe", "compressed-tensors-fp8-block", [("ct20", "ct")], ()),
    ("ct_mxfp4_qwen3moe", "deepseek-fp8", HF, LOGITS),
    ("quark_mxfp4_llama", "modelopt-nvfp4", MO, ()),
    ("pair_cast_mxfp4_to_nvfp4_gptoss", "compressed-tensors-mxfp4", CT, ()),
    ("deepgemm_fp4fp8_dsv4", "deepseek-v4-fp8", HF, LOGITS),
]
"""Source, target, who judges, and whether the logits are compared with the oracle's too."""


def main() -> None:
    """Convert and judge every case; exit 1 if a peer objects."""
    checkpoints, peers = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else ".peers")
    kept = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place:
        for number, (source, target, judges, more) in enumerate(tqdm(CASES, disable=None)):
            folder = Path(place) / str(number)
            command = ["-m", "transcode", "convert", "--to", target]
            made = _run([sys.executable, *command, str(checkpoints / source), str(folder)])
            if made.returncode:
                sys.exit(f"{source} -> {target}: {made.stderr}")
            for environment, peer in judges:
                oracle = one_by_one(checkpoints / source / "oracle", Path(place) / "oracle")
                python = str(peers / environment / "bin/python")
                judge = ["scripts/peers_judge.py", str(folder), "--peer", peer]
                case: dict[str, Any] = {"source": source, "to": target, "environment": environment}
                ran = _run([python, *judge, "--oracle", str(oracle), *more])
                answer: dict[str, Any] = {"problems": [ran.stderr]}
                if not ran.returncode:
                    answer = json.loads(ran.stdout)
                modules = len(answer.pop("modules", {}))
                if "oracle" in answer:
                    answer["oracle"]["not"] = len(answer["oracle"]["not"])
                kept.append(case | {"config": config_of(folder), "modules": modules} | answer)
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    if objections := [
        f"{c['source']} -> {c['to']}: {c['problems']}" for c in kept if c["problems"]
    ]:
        sys.exit("\n".join(objections))


def one_by_one(oracle: Path, place: Path) -> Path:
    """The oracle with stacked experts (`[E, K, N]`; gpt-oss' columns alternate) taken apart, unless
    the target stacks them too, where the judge compares them as they are."""
    weights, apart = load_file(oracle / "weights.safetensors"), dict[str, torch.Tensor]()
    alternating = "gptoss" in oracle.parent.name
    for name, weight in weights.items():
        apart[name] = weight
        container, _, stem = name.rpartition(".")
        for e, matrix in enumerate(weight.transpose(1, 2) if weight.dim() == 3 else ()):
            halves = (matrix[::2], matrix[1::2]) if alternating else matrix.chunk(2)
            up = {"gate_proj": halves[0], "up_proj": halves[1]}
            for leaf, rows in (up if "gate_up" in stem else {"down_proj": matrix}).items():
                apart[f"{container}.{e}.{leaf}"] = rows.contiguous()
    place.mkdir(exist_ok=True)
    save_file(apart, place / "weights.safetensors")
    for name in ("logits.safetensors", "oracle.json"):
        shutil.copy(oracle / name, place / name)
    return place


def config_of(folder: Path) -> str:
    """A digest of what the folder's config.json says of the quantisation."""
    told = json.loads((folder / "config.json").read_text()).get("quantization_config")
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
