"""Golden cases of all encodings, and the rules of their runner."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cases import cases
from tests.golden.__main__ import main
from tests.golden.adapters._norm import norm_of
from tests.golden.case import Case
from tests.golden.runner import run_case

HERE = Path(__file__).parent
VECTORS = sorted((HERE / "golden" / "vectors").glob("*.npz"))


@cases("path", VECTORS, ids=lambda p: p.stem)
def test_golden_cases_pass(path):
    result = run_case(path)
    assert result.status == "PASS", str(result)


def modified_case(path, folder, change):
    """Write a copy of a case with its dictionary of arrays modified by `change`."""
    with np.load(path) as z:
        arrays = change(dict(z))
    np.savez(folder / path.name, **arrays)
    return folder / path.name


def with_config(arrays, **config):
    meta = json.loads(str(arrays["meta"]))
    meta["config"].update(config)
    return {**arrays, "meta": np.array(json.dumps(meta))}


def has_cotangents(path):
    with np.load(path) as z:
        return any(name.startswith("in.cotangent") for name in z.files)


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_a_case_without_cotangents_has_no_gradients_to_compare(step, tmp_path):
    def plain(arrays):
        return {n: a for n, a in arrays.items() if not n.startswith(("in.cotangent", "out.grad."))}

    paths = [p for p in VECTORS if has_cotangents(p)][::step]
    results = [run_case(modified_case(path, tmp_path, plain)) for path in paths]
    assert len(results) > 10
    assert not [str(result) for result in results if result.status != "PASS"]


def test_gradients_without_their_cotangents_fail(tmp_path):
    path = HERE / "golden" / "vectors" / "alibi2d__attn_learned_manhattan_norm_4x4.npz"
    result = run_case(
        modified_case(path, tmp_path, lambda z: {n: a for n, a in z.items() if n != "in.cotangent"})
    )
    assert result.status == "FAIL"
    assert "grad.x" in result.reason


@cases("text", ["LayerNorm eps 1e-5", "<class 'torch.nn.modules.normalization.LayerNorm'>"])
def test_norm_names_with_eps_are_accepted(text, tmp_path):
    path = HERE / "golden" / "vectors" / "alibi2d__attn_learned_manhattan_norm_4x4.npz"
    result = run_case(modified_case(path, tmp_path, lambda z: with_config(z, qk_norm_layer=text)))
    assert result.status == "PASS", str(result)


def test_use_bias_of_selective_rope_must_match_the_parameters(tmp_path):
    path = HERE / "golden" / "vectors" / "selective_rope__lowrank.npz"
    result = run_case(modified_case(path, tmp_path, lambda z: with_config(z, use_bias=False, d_conv=4)))
    assert result.status == "PASS", str(result)
    result = run_case(modified_case(path, tmp_path, lambda z: with_config(z, use_bias=True)))
    assert "the options are not those of the parameters" in result.reason
    # a bias of log(0) per token adds nothing
    bias = np.full((1, 1, 2, 2), -np.inf, np.float32)
    result = run_case(
        modified_case(path, tmp_path, lambda z: with_config(z, use_bias=True) | {"param.phi_bias": bias})
    )
    assert "differs" not in result.reason
    assert "not read" not in result.reason


def test_norms_are_created_with_the_eps_of_their_name():
    assert norm_of("LayerNorm eps 1e-5")(8).eps == 1e-5
    assert norm_of("RMSNorm(eps=1e-06)")(8).eps == 1e-6
    assert norm_of("torch.nn.LayerNorm", 1e-3)(8).eps == 1e-3
    assert norm_of("LayerNorm2d")(8).weight.shape == (8,)
    with pytest.raises(ValueError, match="unknown norm 'layers'"):
        norm_of("layers")


@cases(
    ("case", "array"),
    [
        ("comrope__rope_2d", "param.exponent_matrix"),
        ("alibi2d__attn_constant_norm_wrap_cls_reg4_4x6", "param.m"),
    ],
)
def test_implied_values_are_compared_with_the_tolerance_of_the_case(case, array, tmp_path):
    def run_scaled(fraction):
        with np.load(HERE / "golden" / "vectors" / f"{case}.npz") as z:
            rtol = json.loads(str(z["meta"]))["tolerance"]["rtol"]
        path = HERE / "golden" / "vectors" / f"{case}.npz"
        return run_case(
            modified_case(path, tmp_path, lambda z: z | {array: z[array] * (1 + fraction * rtol)})
        )

    assert "are not those of the case" not in run_scaled(0.5).reason
    assert "are not those of the case" in run_scaled(30).reason


def test_infinities_are_close_only_to_themselves(sincos):
    case = Case(sincos())
    actual, expected = np.array([-np.inf, 0.0, np.inf, np.nan]), np.array([-np.inf, -np.inf, -np.inf, np.nan])
    assert case.close(actual, expected).tolist() == [True, False, False, True]


def write(path, meta, **arrays):
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays)
    return path


@pytest.fixture
def sincos(tmp_path):
    def make(name="sincos2d__case", change=0.0, **extra):
        with np.load(HERE / "golden" / "vectors" / "sincos2d__dinosaw_3x5.npz") as z:
            meta, table = json.loads(str(z["meta"])), z["out.pos_embed"]
        meta["config"].update(extra.pop("config", {}))
        return write(tmp_path / f"{name}.npz", meta, **{"out.pos_embed": table + change}, **extra)

    return make


def test_a_correct_case_passes(sincos):
    assert run_case(sincos()).status == "PASS"


@cases(
    ("arguments", "reason"),
    [
        ({"change": 1e-3}, "differs in 240 of 240 values"),
        ({"config": {"surprise": 1}}, "not read: ['config.surprise']"),
        ({"in.x": np.zeros(2)}, "not read: ['in.x']"),
        ({"param.w": np.zeros(2)}, "not read: ['param.w']"),
        ({"out.more": np.zeros(2)}, "not computed: ['more']"),
    ],
)
def test_wrong_or_unread_values_fail(sincos, arguments, reason):
    result = run_case(sincos(**arguments))
    assert result.status == "FAIL"
    assert reason in result.reason


def test_a_wrong_shape_fails(sincos):
    assert "has shape" in run_case(sincos(config={"h": 4})).reason


def test_a_broken_file_fails(tmp_path):
    (tmp_path / "x__y.npz").write_bytes(b"nothing")
    assert run_case(tmp_path / "x__y.npz").status == "FAIL"


def test_the_command_prints_results_and_sets_the_exit_code(sincos, tmp_path, monkeypatch, capsys):
    sincos("sincos2d__good")
    sincos("sincos2d__bad", change=1.0)
    write(tmp_path / "later__one.npz", {"encoding": "later", "config": {}, "tolerance": {"rtol": 0.5}})
    command = ["tests.golden", str(tmp_path), "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAIL later__one inf 0.5 there is no adapter; write tests/golden/adapters/later.py"
    assert lines[1].startswith("FAIL sincos2d__bad 0.5 1e-05 table: pos_embed differs")
    assert lines[2].startswith("PASS sincos2d__good")
    assert lines[-1] == "1 passed, 2 failed"
    assert [r["status"] for r in json.loads((tmp_path / "out.json").read_text())] == ["FAIL", "FAIL", "PASS"]
    monkeypatch.setattr(sys, "argv", [*command, "-k", "good"])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"
