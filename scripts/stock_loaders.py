"""Ask SGLang's probe and vLLM's loader, as in their wheels, what they take of a packed folder.

Their own functions are cut out of the wheels' source and run on the CPU, nothing else of the
runtimes. A packed folder must give them nothing: no header that SGLang probes for the dtype of raw
experts, no file with packed experts that vLLM opens, no name that vLLM maps to an expert.

    python scripts/stock_loaders.py --vllm VLLM.whl --sglang SGLANG.whl FOLDER...

Exit code 0: nothing is taken for raw weights; 3: something is, as printed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

UTILS = "srt/model_loader/weight_utils.py"
EXPERTS = "vllm/model_executor/layers/fused_moe/routed_experts.py"
LOADER = "vllm/model_executor/model_loader/weight_utils.py"


def cut(wheel: Path, file: str, *names: str) -> dict[str, Any]:
    """Functions, methods and constants of a wheel's file, without what is around them."""
    tree = ast.parse(zipfile.ZipFile(wheel).read(file))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and name_of(n) in names]
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    space: dict[str, Any] = {
        "json": json, "os": os, "re": re, "struct": struct, "Path": Path, "__name__": "cut",
    }  # fmt: skip
    future = ast.parse("from __future__ import annotations\nfrom typing import Optional").body
    exec(compile(ast.Module([*future, *found], []), file, "exec"), space)
    return space


def name_of(node: ast.AST) -> str:
    """The name that a definition or an assignment gives."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def taken(folder: Path, vllm: Path, sglang: Path) -> Iterator[str]:
    """What either of them takes for raw experts."""
    probe = cut(sglang, f"sglang/{UTILS}", "probe_routed_expert_weight_dtype",
                "_ROUTED_EXPERT_KEY_RE")  # fmt: skip
    if dtype := probe["probe_routed_expert_weight_dtype"](str(folder)):
        yield f"SGLang probes {dtype}"
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    index = "model.safetensors.index.json"
    pick = cut(vllm, LOADER, "filter_duplicate_safetensors_files")
    opened = pick["filter_duplicate_safetensors_files"](files, str(folder), index)
    yield from (f"vLLM opens {Path(f).name}" for f in opened if Path(f).name.startswith("experts"))
    build = cut(vllm, EXPERTS, "build_expert_params_mapping")["build_expert_params_mapping"]
    config = json.loads((folder / "config.json").read_text())
    count = max((v for k, v in config.items() if "experts" in k and isinstance(v, int)), default=1)
    for names in (("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3")):
        pieces = {entry[1] for entry in mapping(build, names, count)}
        for file in opened:
            with Path(file).open("rb") as f:
                header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            for tensor in header:
                if any(piece in tensor for piece in pieces) and tensor.endswith(".weight"):
                    yield f"vLLM maps {tensor} {header[tensor]['dtype']} to an expert"


def mapping(build: Any, names: tuple[str, ...], count: int) -> Any:
    """vLLM's mapping of names to experts, each of which is there once."""
    build.__globals__["EplbState"] = SimpleNamespace(
        build_initial_global_physical_to_logical_map=lambda experts, extra: list(range(experts))
    )
    return build(*names, count)


def main() -> None:
    """Ask about every folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args()
    found = {f: list(taken(f, given.vllm, given.sglang)) for f in given.folders}
    for folder, lines in found.items():
        print(f"{folder.name}: {'; '.join(lines) or 'nothing is taken for raw weights'}")
    sys.exit(3 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
