"""The kernel check, with an emulation of vLLM's two ops (marlin_ops) where there is no GPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import marlin_decode
from tests.build import Spec, build, edit
from tests.convert import pack
from tests.marlin_ops import OPS, Pair, change
from transcode.errors import TranscodeError
from transcode.gemm import check, kernel_check, table
from transcode.gemm import ops as vllm_ops
from transcode.gemm.ops import DENSE, MOE, Routing, signature
from transcode.gemm.trial import ACCEPTANCE


def converted(place: Path, spec: Spec, *options: str) -> Pair:
    """A source and its destination."""
    build(place / "src", spec)
    return packed(place, *options)


def packed(place: Path, *options: str) -> Pair:
    return place / "src", pack(place / "src", place / "dst", *options)


SMALL = Spec(hidden=128, intermediate=96, experts=3, layers=1)
EXPERTS = "model.layers.0.mlp.experts"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return converted(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture
def copy(small: Pair, tmp_path: Path) -> Pair:
    """The small one, to be altered."""
    target = tmp_path / "dst"
    target.mkdir()
    for path in small[1].iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return small[0], target


CASES = {
    "padded in N and K": Spec(hidden=192, intermediate=112, experts=3, layers=1),
    "one expert": Spec(hidden=128, intermediate=64, experts=1, layers=1),
    "not gated": Spec(hidden=128, intermediate=96, experts=3, layers=1, gated=False),
    "relu2": Spec(model_type="nemotron_h", hidden=128, intermediate=96, experts=3, layers=1),
    "dense": Spec(model_type="llama", hidden=128, intermediate=208, layers=1, head_dim=16),
    "biases": replace(SMALL, biases=True, expert_biases=True),
    "a fold for each expert": replace(SMALL, gate_up_ratio=(0.5, 1.7, 9.0)),
    "a fold with biases": replace(SMALL, gate_up_ratio=(0.5, 1.7, 9.0), expert_biases=True),
    "q, k, v rescaled": replace(SMALL, qkv_ratio=(0.3, 1.9)),
    "only w13": replace(SMALL, down="fp8"),
    "only w2": replace(SMALL, gate_up="fp8"),
    "compressed-tensors": replace(SMALL, dialect="compressed-tensors"),
    "scales flushed": replace(SMALL, tiny_scales=True),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_packed_gives_the_sources_products(case: str, dtype: str, tmp_path: Path) -> None:
    done = check(*converted(tmp_path, CASES[case], "--dtype", dtype), OPS["0.25.1"], False)
    assert done["failures"] == []
    assert done["passed"]
    assert bool(done["notes"]) == bool(CASES[case].expert_biases)
    assert done["control"] > 0.5
    errors = [e for entry in (*done["dense"], *done["moe"]) for e in entry["errors"].values()]
    # A result is rounded once to 8 or 11 bits: at most 2^-9 or 2^-12 of it.
    assert 0 < max(errors) < (2.0**-9 if dtype == "bfloat16" else 2.0**-12)
    assert json.loads(json.dumps(done, allow_nan=False)) == done


def test_a_bias_of_w2_that_the_kernel_spoils_is_a_note(tmp_path: Path) -> None:
    done = check(*converted(tmp_path, CASES["biases"]), OPS["0.25.1"], False)
    assert done["passed"]
    assert done["moe"][0]["layer"] < 6e-3
    assert len(done["notes"]) == 1
    assert done["notes"][0].startswith(f"{EXPERTS}: vLLM's kernel does not add w2's bias rightly")
    assert f"note: {done['notes'][0]}" in table(done)


def test_both_releases_signatures_are_called_alike(small: Pair) -> None:
    one, two = (check(*small, OPS[release], True) for release in OPS)
    assert [one["kernel"]["ops"], two["kernel"]["ops"]] == [
        {DENSE: "0.25.1", MOE: "0.25.1"},
        {DENSE: "0.33.0", MOE: "0.33.0"},
    ]
    assert one["dense"] == two["dense"]
    assert one["moe"] == two["moe"]


def test_a_signature_that_is_not_known_is_an_error() -> None:
    with pytest.raises(TranscodeError, match=r"takes \(a c_or_none .*0\.25\.1, 0\.33\.0"):
        signature(DENSE, OPS["0.25.1"].moe)


def test_a_fold_is_measured_against_the_source_a_rescale_against_what_is_packed(
    tmp_path: Path,
) -> None:
    spec = replace(SMALL, gate_up_ratio=(0.5, 1.7, 9.0))
    build(tmp_path / "src", spec)
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "src").symlink_to(tmp_path / "src")
    folded, rescaled = (
        check(*packed(place, "--unify", how), OPS["0.25.1"], False)["moe"][0]
        for place, how in ((tmp_path, "fold"), (tmp_path / "twin", "rescale"))
    )
    assert folded["against"] == "the source"
    assert folded["layer"] == folded["from_source"] < 6e-3
    assert rescaled["against"] == "what is packed"
    assert rescaled["layer"] < 6e-3 < rescaled["from_source"] < 0.06


@pytest.mark.parametrize(
    ("name", "alter"),
    [
        (f"{Q}.weight", lambda t: t.roll(1, 1)),
        (f"{Q}.weight_scale", lambda t: t.view(torch.uint8).roll(1, 1).view(t.dtype)),
        (f"{EXPERTS}.w13_weight", lambda t: t.roll(1, 0)),
        (f"{EXPERTS}.w13_weight_scale", lambda t: t.view(torch.uint8).roll(1, 2).view(t.dtype)),
        (f"{EXPERTS}.w13_weight_scale_2", lambda t: t.roll(1, 0)),
        (f"{EXPERTS}.w2_weight", lambda t: torch.where(torch.arange(3)[:, None, None] == 2, 0, t)),
        (f"{EXPERTS}.w2_weight_scale_2", lambda t: t * 1.01),
    ],
)
def test_an_altered_tensor_fails(name: str, alter: Callable[[Tensor], Tensor], copy: Pair) -> None:
    change(copy[1], name, alter)
    done = check(*copy, OPS["0.25.1"], False)
    assert not done["passed"]
    module = name.rpartition(".")[0]
    assert all(module in failure for failure in done["failures"])


def test_a_bias_in_plain_order_fails(tmp_path: Path) -> None:
    source, target = converted(tmp_path, replace(SMALL, biases=True))
    change(target, f"{Q}.bias", marlin_decode.bias)
    done = check(source, target, OPS["0.25.1"], False)
    assert [f.partition(":")[0] for f in done["failures"]] == [Q, f"{Q} by itself"]


def test_members_with_different_global_scales_fail(copy: Pair) -> None:
    change(copy[1], f"{Q}.weight_global_scale", lambda t: t * 2)
    done = check(*copy, OPS["0.25.1"], False)
    assert len(done["failures"]) == 1
    assert "q_proj+k_proj+v_proj: global scales differ in one group" in done["failures"][0]


def test_a_missing_and_a_misshapen_tensor_fail_and_the_rest_is_run(copy: Pair) -> None:
    change(copy[1], f"{EXPERTS}.w2_weight", lambda t: t[:, :-1].contiguous())
    change(copy[1], f"{Q}.weight_scale", lambda t: t.view(torch.uint8))
    done = check(*copy, OPS["0.25.1"], False)
    assert [f.partition(" wanted ")[2] for f in done["failures"]] == [
        "F8_E4M3 [8, 128]",
        "I32 [3, 8, 256]",
    ]
    assert [entry["name"] for entry in done["dense"] if "errors" in entry] == [
        "model.layers.0.self_attn.o_proj"
    ]


def test_an_expert_that_gets_garbage_is_not_hidden_by_larger_ones(copy: Pair) -> None:
    def alter(words: Tensor) -> Tensor:
        words[1] = words[1].roll(1, -1)
        return words

    change(copy[1], f"{EXPERTS}.w13_weight", alter)
    failures = check(*copy, OPS["0.25.1"], False)["failures"]
    assert [f.partition(":")[0] for f in failures[:2]] == [
        f"{EXPERTS}.1.gate_proj",
        f"{EXPERTS}.1.up_proj",
    ]


def test_a_kernel_that_ignores_the_order_of_codes_is_reported_as_a_broken_check(
    small: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transcode.gemm.trial.SWAPPED", {4: list(range(8))})
    done = check(*small, OPS["0.25.1"], False)
    assert not done["passed"]
    assert len(done["failures"]) == len(done["dense"]) + len(done["moe"]) == 3
    assert all("the check is broken" in failure for failure in done["failures"])


def test_rows_that_the_kernel_does_not_write_fail_as_numbers(small: Pair) -> None:
    def lazy(*args: Any) -> Tensor:
        result: Tensor = OPS["0.25.1"].moe(*args)
        result[3] = args[1][3]
        return result

    lazy._schema = OPS["0.25.1"].moe._schema  # type: ignore[attr-defined]
    done = check(*small, replace(OPS["0.25.1"], moe=lazy), False)
    assert any("relative error 1.00e+09" in failure for failure in done["failures"])
    assert json.dumps(done, allow_nan=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("top", [False, True])
def test_small_scales_are_wanted_as_the_file_is_meant_to_hold_them(
    top: bool, dtype: str, tmp_path: Path
) -> None:
    build(tmp_path / "src", SMALL)

    def small_scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """2^-7 and 2^-6 in turn; `top`: but 448 over one block of zeros, so no lift helps."""
        found = dict(tensors)
        for name in (n for n in tensors if "experts" in n and n.endswith(".weight_scale")):
            scale = torch.full_like(tensors[name].float(), 2.0**-6)
            scale[:, ::2] = 2.0**-7
            if top:
                scale[0, 0] = 448
                found[name.removesuffix("_scale")] = tensors[name.removesuffix("_scale")].clone()
                found[name.removesuffix("_scale")][0, :8] = 0
            found[name] = scale.to(tensors[name].dtype)
        return found

    edit(tmp_path / "src", small_scales)
    done = check(*packed(tmp_path, "--dtype", dtype), OPS["0.25.1"], False)
    assert done["failures"] == []
    assert done["moe"][0]["against"] == ("what is packed" if top else "the source")
    assert (done["moe"][0]["from_source"] > 0.3) == top


def test_zeros_pass_as_zeros_and_prove_nothing_alone(tmp_path: Path) -> None:
    build(tmp_path / "src", SMALL)
    expert = f"{EXPERTS}.1.down_proj"

    def zero(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {f"{expert}.weight": torch.zeros_like(tensors[f"{expert}.weight"])}

    edit(tmp_path / "src", zero)
    done = check(*packed(tmp_path), OPS["0.25.1"], False)
    assert done["passed"]
    assert done["control"] > 0.5

    everything = tmp_path / "all"
    everything.mkdir()
    build(everything / "src", SMALL)
    edit(
        everything / "src",
        lambda ts: {n: t * 0 if t.dtype is torch.uint8 else t for n, t in ts.items()},
    )
    done = check(*packed(everything), OPS["0.25.1"], False)
    assert done["failures"] == ["every matrix that was run is zero: nothing is proved"]
    assert done["control"] is None


def test_layers_and_experts_are_sampled_by_kind_unless_all_are_asked_for(tmp_path: Path) -> None:
    ratios = (1.0,) * 4 + (2.0,) + (1.0,) * 6
    spec = Spec(hidden=128, intermediate=64, experts=11, layers=3, gate_up_ratio=ratios)
    paths = converted(tmp_path, spec)
    some, every = (check(*paths, OPS["0.25.1"], everything) for everything in (False, True))
    assert [entry["name"] for entry in some["moe"]] == [
        "model.layers.0.mlp.experts",
        "model.layers.2.mlp.experts",
    ]
    assert some["moe"][0]["experts"] == [0, 3, 4, 6, 10]  # 4 is folded
    assert len(some["dense"]) == 4
    assert some["stacks"] == {"run": 8, "of": 12, "everything": False}
    assert [len(entry["experts"]) for entry in every["moe"]] == [11, 11, 11]
    assert every["stacks"] == {"run": 12, "of": 12, "everything": True}
    assert every["passed"]


def test_joined_columns_equal_each_members_own(small: Pair) -> None:
    joined = check(*small, OPS["0.25.1"], False)["dense"][1]
    assert joined["name"].endswith("q_proj+k_proj+v_proj")
    assert list(joined["errors"]) == ["q_proj", "k_proj", "v_proj"]
    assert joined["alone_and_joined"] == dict.fromkeys(("q_proj", "k_proj", "v_proj"), 0.0)


def test_every_pair_stands_once_in_the_blocks_of_its_expert() -> None:
    experts = torch.tensor([[0, 2], [2, 0], [0, 3], [2, 3], [0, 2]])
    order, owners, count = Routing(experts, torch.ones(5, 2)).blocks()
    assert order.dtype == owners.dtype == count.dtype == torch.int32
    assert order.tolist() == [0, 3, 4, 8, *[10] * 4, 1, 2, 6, 9, *[10] * 4, 5, 7, *[10] * 6]
    assert owners.tolist() == [0, 2, 3]
    assert count.tolist() == [24]


def test_the_table_shows_every_run_and_what_ran(small: Pair) -> None:
    lines = table(check(*small, OPS["0.25.1"], False)).splitlines()
    assert lines[0].split() == ["run", "relative", "errors", "layer", "control"]
    assert lines[3].startswith("model.layers.0.mlp.experts")
    assert lines[5].startswith("4 of 4 stacks run in bfloat16 on the CPU by vLLM's kernels")


def test_without_a_gpu_the_error_says_so(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TranscodeError, match="torch sees none here"):
        kernel_check(*small, [], False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as loading goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(vllm_ops, "_loaded", lambda name: None)


@pytest.mark.usefixtures("gpu")
def test_without_vllm_the_error_names_the_files_and_the_option(
    small: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TranscodeError, match=r"not installed; name _C_stable.* --vllm-lib"):
        kernel_check(*small, [], False)


@pytest.mark.usefixtures("gpu")
def test_a_library_that_is_missing_or_none_is_named(small: Pair, tmp_path: Path) -> None:
    with pytest.raises(TranscodeError, match=r"none\.so: no such file"):
        kernel_check(*small, [tmp_path / "none.so"], False)
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(TranscodeError, match=r"text\.so: cannot be loaded"):
        kernel_check(*small, [tmp_path / "text.so"], False)


def test_a_vllm_is_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TranscodeError, match="has neither"):
        vllm_ops.find()
    (package / vllm_ops.MOE_FILE).touch()
    assert vllm_ops.find() == [package / vllm_ops.MOE_FILE]


def test_a_kernel_that_refuses_is_an_error_with_its_words(small: Pair) -> None:
    def refuse(*args: Any) -> Tensor:
        raise RuntimeError("Invalid thread config: thread_m_blocks = 1\nmore lines")

    refuse._schema = OPS["0.25.1"].dense._schema  # type: ignore[attr-defined]
    with pytest.raises(
        TranscodeError, match=r"marlin_gemm does not run on the CPU: Invalid thread config: .* = 1$"
    ):
        check(*small, replace(OPS["0.25.1"], dense=refuse), False)


def test_an_op_that_is_not_needed_need_not_be_there(small: Pair, tmp_path: Path) -> None:
    with pytest.raises(TranscodeError, match="none of emulation has _moe_C::"):
        check(*small, replace(OPS["0.25.1"], moe=None), False)
    paths = converted(tmp_path, replace(SMALL, attention="bf16"))
    assert check(*paths, replace(OPS["0.25.1"], dense=None), False)["passed"]


def usable() -> bool:
    try:
        vllm_ops.load([], "bfloat16")
    except TranscodeError:
        return False
    return True


@pytest.mark.skipif(not torch.cuda.is_available() or not usable(), reason="needs a GPU and vLLM")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_vllms_own_kernels_agree(case: str, dtype: str, tmp_path: Path) -> None:
    done = kernel_check(*converted(tmp_path, CASES[case], "--dtype", dtype), [], True)
    assert done["failures"] == []
    assert done["control"] > ACCEPTANCE[dtype].control
