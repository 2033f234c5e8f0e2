"""Any producer's kind in any size, whole or damaged, to any form: one line, or a right answer.

A right answer is one that `verify` proves and in which an independent decoder reads every module
that was not touched as its truth. A damaged weight never makes a success.
`scripts/soak` runs ten times the count with new draws each time.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests import packed
from tests.build import Tensors, edit
from tests.convert import Ran, run
from tests.producers import KINDS, Built
from tests.rewriting import ULP, close, meaning, one_thread

__all__ = ["one_thread"]

SOAK = settings.get_current_profile_name() == "soak"
EXAMPLES = 60
TARGETS = (
    *("canonical", "compressed-tensors", "modelopt", "bf16") * 3,
    "canonical", "compressed-tensors", "modelopt", "quark", "bf16", "deepseek-fp8", "deepseek-v4",
    "gpt-oss", "compressed-tensors-nvfp4a16", "modelopt-nvfp4", "deepseek-v4-nvfp4", "quark-fp8",
)  # fmt: skip
OPTIONS = ("--fused", "--drop-kv-scales", "--fill-input-scale", "--exact")
WIDTHS = (32, 64, 96, 160)
ESSENTIAL = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale",
             "weight_scale_inv")  # fmt: skip
"""Leaves without which a quantised module means nothing."""


def fuzz(count: int) -> settings:
    """So many examples, the same each time; in a soak ten times as many, and others each time."""
    return settings(
        max_examples=count * 10 if SOAK else count, derandomize=not SOAK, deadline=None,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A checkpoint to build, what to ask for, and what to damage first."""

    kind: str
    hidden: int
    intermediate: int
    experts: int
    target: str
    options: tuple[str, ...]
    damage: str
    at: int


CASES = st.builds(
    Case, st.sampled_from(sorted(KINDS)), st.sampled_from(WIDTHS), st.sampled_from(WIDTHS),
    st.integers(1, 3), st.sampled_from(TARGETS),
    st.lists(st.sampled_from(OPTIONS), max_size=2, unique=True).map(tuple),
    st.sampled_from(["", "", "drop", "expert", "extra", "rename", "narrow", "bytes", "retype"]),
    st.integers(0, 1 << 16),
)  # fmt: skip


def built(case: Case, path: Path) -> Built:
    kind = KINDS[case.kind]
    own = kind.spec.experts == 0 or "text_config" in kind.top  # which says how many
    experts = kind.spec.experts if own else case.experts
    spec = replace(kind.spec, hidden=case.hidden, intermediate=case.intermediate, experts=experts)
    return replace(kind, spec=spec)(path)


def damaged(case: Case, source: Path) -> set[str]:
    """Damage the files; the names of the tensors that are not what they were."""
    touched = set[str]()

    def change(tensors: Tensors) -> Tensors:
        names = sorted(tensors)
        name = names[case.at % len(names)]
        value = tensors[name]
        changed: Tensors = dict(tensors)
        match case.damage:
            case "drop":
                touched.add(name)
                del changed[name]
            case "expert":
                at = re.search(r".+\.experts\.\d+\.", name)
                gone = [n for n in names if at and n.startswith(at[0])]
                touched.update(gone)
                for n in gone:
                    del changed[n]
            case "extra":
                stem = name.rpartition(".")[0] or name
                leaf = ("bias", "input_scale", "extra.weight", "k_scale", "zeros")[case.at % 5]
                touched.add(f"{stem}.{leaf}")
                changed[f"{stem}.{leaf}"] = torch.zeros(3, 5)
            case "rename":
                new = re.sub(r"\d+", lambda m: str(int(m[0]) + 7), name, count=2)
                touched.update((name, new))
                changed[new] = changed.pop(name)
            case "narrow" if value.dim() and value.shape[0] > 1:
                touched.add(name)
                changed[name] = value[: value.shape[0] // 2].clone()
            case "bytes":
                touched.add(name)
                flat = value.clone().flatten()
                flat.view(torch.uint8)[-1:] = case.at % 256
                changed[name] = flat.reshape(value.shape)
            case "retype":
                touched.add(name)
                into = {1: torch.int8, 2: torch.float16, 4: torch.int32}.get(value.element_size())
                changed[name] = value.view(into) if into else value
        return changed

    edit(source, change)
    return touched


def hit(module: str, touched: set[str]) -> bool:
    """Whether a tensor of the module, or of the stack that it is in, was touched."""
    container = module.partition(".experts.")[0] + ".experts."
    stacked = rf"{re.escape(container)}(?!\d)"
    return any(n.startswith(f"{module}.") or re.match(stacked, n) for n in touched) or (
        ".experts." in module and any(n.startswith(module.rpartition(".")[0]) for n in touched)
    )


def standard(module: str) -> str:
    return re.sub(r"(\.experts)\.(\w+_proj)\.(\d+)$", r"\1.\3.\2", module)


def right(case: Case, source: Path, made: Built, touched: set[str], into: Path) -> None:
    """The answer is proved, and means what the source meant."""
    proved = run("verify", source, into)
    assert proved.code == 0, proved.out + proved.err
    rel = ULP if "nvfp4" in case.kind or case.kind in MORE_NVFP4 else 0
    int4 = {n.removesuffix(".weight_shape") for n in made.tensors if n.endswith(".weight_shape")}
    truth = {standard(m): t for m, t in made.truth.items() if m not in int4 and not hit(m, touched)}
    if case.target == "bf16":
        if "--fused" not in case.options:
            out = packed.tensors(into)
            for module, weight in truth.items():
                assert close(out[f"{module}.weight"].float(), weight, 2**-8), module
        return
    found = meaning(into).weights
    for module, weight in truth.items():
        assert close(found[module], weight, rel), module


MORE_NVFP4 = ("modelopt-mixed", "ct-mixed", "modelopt-w4a8")


def one_line(ran: Ran, into: Path) -> None:
    assert ran.code in (1, 4), ran.err
    assert len(ran.err.strip().splitlines()) == 1, ran.err
    assert not into.exists()


def lost(case: Case, made: Built, touched: set[str]) -> bool:
    """Whether a weight lost a tensor that it cannot do without."""
    modules = {n.rpartition(".")[0] for n in touched}
    leaves = {n.rpartition(".")[2] for n in touched}
    quantised = bool(modules & made.truth.keys())
    return case.damage == "drop" and quantised and bool(leaves & {*ESSENTIAL})


def in_a_folder(check: Callable[[Path], None]) -> None:
    root = Path(tempfile.mkdtemp(prefix="rewrite"))
    try:
        check(root)
    finally:
        shutil.rmtree(root)


@fuzz(EXAMPLES)
@given(CASES)
def test_any_kind_in_any_size_is_right_or_refused(case: Case) -> None:
    def check(root: Path) -> None:
        made = built(case, root / "src")
        touched = damaged(case, root / "src") if case.damage else set[str]()
        options = ("--to", case.target, *case.options)
        ran = run("convert", *options, root / "src", root / "dst")
        event(f"{case.damage or 'whole'}: exit {ran.code}")
        if ran.code == 0:
            assert not lost(case, made, touched), touched
            right(case, root / "src", made, touched, root / "dst")
        else:
            one_line(ran, root / "dst")

    in_a_folder(check)


@fuzz(EXAMPLES // 2)
@given(
    st.sampled_from([k for k in sorted(KINDS) if not KINDS[k].refused and "int4" not in k]),
    st.sampled_from(WIDTHS), st.sampled_from(WIDTHS), st.integers(1, 4),
)  # fmt: skip
def test_the_canonical_form_takes_every_size_and_keeps_every_byte(
    kind: str, hidden: int, intermediate: int, experts: int
) -> None:
    """Also where H = I, H = 2I or there is one expert: nothing is told by shape alone."""
    case = Case(kind, hidden, intermediate, experts, "canonical", (), "", 0)

    def check(root: Path) -> None:
        made = built(case, root / "src")
        ran = run("convert", "--to", "canonical", root / "src", root / "dst")
        assert ran.code == 0, ran.err
        right(case, root / "src", made, set(), root / "dst")
        back = TWIN.get(kind.split("-")[0], "compressed-tensors")
        again = run("convert", "--to", back, root / "dst", root / "back")
        event(f"{back}: exit {again.code}")
        if again.code == 0:
            right(case, root / "dst", made, set(), root / "back")
        else:
            one_line(again, root / "back")

    in_a_folder(check)


TWIN = {"modelopt": "compressed-tensors", "ct": "modelopt", "quark": "modelopt", "v4": "modelopt"}
