"""Serve folders with real vLLM and compare the log-probabilities that come out.

    python scripts/serve_vllm.py [options] FOLDER[:REFERENCE...] ...

A REFERENCE is a file of `input_ids` [n] and `logits` [n, vocab], as `oracle/logits.safetensors`
(not inside FOLDER: vLLM loads every `.safetensors` there), or another FOLDER of the same call. Over
the n - 1 positions that a prompt has log-probabilities for: the largest difference, the mean KL
divergence from the reference, and how often the likeliest token is the same. Every folder gets a
process of its own, so that one that fails leaves the others alone. The last line is one JSON
object, with the largest difference of each position as well: where a router's choice is nearly a
tie, one position may stand out. Small models only: every position's whole vocabulary is asked for.
Run it where vLLM and a GPU are; nothing of transcode is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
CHOSEN = r"Selected \S+ for \S+|Using (?!default).*?(?:GEMM|MoE\b(?: backend)?)|.*may be affected"
RAISED = r"(?m)^(?:\[rank\d\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)"
ARGUMENTS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,  # no profiling of memory, which the other jobs would disturb
    "max_logprobs": -1,
    "dtype": "bfloat16",
    "attention_backend": "TRITON_ATTN",
}


def serve(folder: str, ids: list[int], output: str, arguments: dict[str, Any]) -> None:
    """Load the folder and save the log-probabilities of every token after each prefix."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, **arguments)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    [result] = llm.generate([{"prompt_token_ids": ids}], sampling)
    rows = [[row[token].logprob for token in sorted(row)] for row in result.prompt_logprobs[1:]]
    save_file({"logprobs": torch.tensor(rows)}, output)


def difference(served: Tensor, reference: Tensor) -> dict[str, Any]:
    """What distinguishes two [positions, vocab] of log-probabilities."""
    served, reference = served.double(), reference.double()
    apart = (served - reference).abs().amax(-1)
    same = (served.argmax(-1) == reference.argmax(-1)).sum().item()
    return {
        "max_abs_dlogp": apart.max().item(),
        "mean_kl": (reference.exp() * (reference - served)).sum(-1).mean().item(),
        "top1": f"{same}/{len(reference)}",
        "by_position": [round(value, 4) for value in apart.tolist()],
    }


def child(given: list[Any], output: Path, log: Path, limit: float) -> dict[str, Any]:
    """Run `serve` in a process of its own; the kernels that its log names, and its error."""
    command = [sys.executable, __file__, "--serve", json.dumps(given)]
    started = perf_counter()
    with log.open("w") as stream:
        try:
            subprocess.run(
                command, stdout=stream, stderr=stream, env=os.environ | SETTINGS, timeout=limit
            )
        except subprocess.TimeoutExpired:
            stream.write(f"\nTimeoutError: nothing after {limit:g} s\n")
    text = log.read_text(errors="replace")
    found: dict[str, Any] = {"seconds": round(perf_counter() - started, 1)}
    found["kernels"] = list(dict.fromkeys(re.findall(rf"\] ({CHOSEN})", text)))
    if not output.exists():
        found["error"] = list(dict.fromkeys(re.findall(RAISED, text))) or text.splitlines()[-1:]
    return found


def main() -> None:
    """Serve the folders, print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER[:REFERENCE...]")
    parser.add_argument("--jobs", type=int, default=1, help="folders at a time")
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    parser.add_argument("--limit", type=float, default=300, help="seconds a folder")
    parser.add_argument("--json", type=Path, help="write the JSON object here too")
    parser.add_argument("--logs", type=Path, help="keep each folder's log here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*json.loads(options.serve))
        return
    wanted = {entry.split(":")[0]: entry.split(":")[1:] for entry in options.folders}
    files = {name for names in wanted.values() for name in names if Path(name).is_file()}
    oracles = {name: load_file(name) for name in files}
    prompts = {tuple(oracle["input_ids"].tolist()) for oracle in oracles.values()}
    if len(prompts) != 1 or any(n not in files | set(wanted) for ns in wanted.values() for n in ns):
        parser.error("references are files, all of one prompt, at least one; or folders given here")
    [ids] = prompts
    known = {name: o["logits"].double().log_softmax(-1)[:-1] for name, o in oracles.items()}
    scratch = Path(tempfile.mkdtemp())
    logs = options.logs or scratch
    logs.mkdir(parents=True, exist_ok=True)

    def run(folder: str) -> dict[str, Any]:
        name = f"{list(wanted).index(folder)}-{Path(folder).name}"
        output = scratch / f"{name}.safetensors"
        given = [folder, ids, str(output), ARGUMENTS | options.llm]
        result = child(given, output, logs / f"{name}.log", options.limit)
        if "error" not in result:
            known[folder] = load_file(output)["logprobs"]
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip(wanted, pool.map(run, wanted), strict=True))
    for folder, result in results.items():
        print(f"{folder} ({result['seconds']} s): {'; '.join(result['kernels'])}")
        for line in result.get("error", []):
            print(f"    {line}")
        if folder in known:
            others = [name for name in wanted[folder] if name in known]
            result["against"] = {n: difference(known[folder], known[n]) for n in others}
            for name, d in result["against"].items():
                figures = f"max {d['max_abs_dlogp']:.2g}, KL {d['mean_kl']:.2g}, top-1 {d['top1']}"
                print(f"    {figures} against {name}")
    print(line := json.dumps(results))
    if options.json:
        options.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
