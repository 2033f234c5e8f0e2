"""Every row of the table of layouts, of every built and real checkpoint that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import packed
from tests.build import Tensors
from tests.layouts import (
    ODD_ORDER,
    REAL_NAMES,
    ROWS,
    VARIANTS,
    Form,
    Place,
    direct,
    own,
    source,
    truth,
    ways,
)
from tests.rewriting import ULP, convert, load_json, one_thread, proved, same_bytes

__all__ = ["direct", "one_thread", "source"]


def differing(found: Tensor, wanted: Tensor, rel: float, *, flushed: bool) -> bool:
    """Whether any weight is another; one that was flushed is zero."""
    if found.shape != wanted.shape:
        return True
    near = (found - wanted).abs() <= rel * wanted.abs()
    return not bool((near | (found == 0) if flushed else near).all())


def lost(target: Path) -> set[str]:
    """The modules that have flushed scales which are not stored."""
    stacks = load_json(target / "transcode_report.json")["stacks"]
    return {f["module"] for s in stacks for f in s["flushed"]["scales"] if f["at"]}


def said(path: Path, dtype: str) -> Any:
    """A config; what was packed for another dtype names that one ever after."""
    return json.loads(path.read_text().replace('"bfloat16"', f'"{dtype}"'))


@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_what_is_packed_means_the_source_and_comes_back(
    source: Place, direct: Form, tmp_path: Path, name: str, variant: str
) -> None:
    path = source(name)
    target = proved(VARIANTS[variant][0], path, tmp_path / "packed", *VARIANTS[variant][1:])
    found, dtype = packed.weights(target), packed.config(target)["activation_dtype"]
    assert found
    if name != ODD_ORDER:
        wanted, biases, zero = truth(path, variant), packed.biases(target), lost(target)
        rel = ULP if name.startswith("ct") and "sglang" not in variant else 0.0
        assert [
            m for m, w in found.items()
            if differing(w, wanted.weights[m], rel, flushed=m in zero)
        ] == []  # fmt: skip
        assert biases.keys() == wanted.biases.keys() & found.keys()
        assert [m for m, b in biases.items() if not torch.equal(b, wanted.biases[m])] == []
    for form, *options in ways(name):
        back, want = convert(form, target, tmp_path / "back", *options), direct(name, form)
        same_bytes(packed.tensors(back), without_nan(packed.tensors(want)))
        for file in ("config.json", "hf_quant_config.json"):
            if (want / file).exists():
                assert load_json(back / file) == said(want / file, dtype)


def without_nan(tensors: Tensors) -> Tensors:
    """Scales over zeros that are NaN are zero once they were packed."""
    return {n: t if not t.isnan().any() else t.float().nan_to_num(0).to(t.dtype)
            for n, t in tensors.items()}  # fmt: skip


@pytest.mark.parametrize("name", REAL_NAMES)
def test_the_own_form_of_real_ones_is_the_source(source: Place, direct: Form, name: str) -> None:
    mine = packed.tensors(direct(name, own(name)[0]))
    if not name.endswith("zeros"):
        same_bytes(mine, packed.tensors(source(name)))
