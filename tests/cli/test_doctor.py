import json

import pytest
import timm
import torch

import vispe
from vispe.cli.main import main
from vispe.encodings import attention_layer
from vispe.hosts.attention_paths import STOCK, attention_paths

MODEL = ["doctor", "test_vit", "--device", "cpu"]


def messages(capsys, *words):
    assert main([*MODEL, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def failed(capsys, *words):
    assert main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_learned_bias_uses_a_dense_mask_on_cpu(capsys):
    report = messages(
        capsys, "--encoding", "alibi2d(slopes=learned)", "--img-size", "96,128", "--batch-size", "2"
    )
    assert report["image_size"] == [96, 128]
    assert report["batch"] == 2
    (path,) = report["paths"]
    assert path["backend"] == "sdpa"
    assert path["reason"] == "one dense mask, cached until its parameters change"
    assert path["refused"].keys() >= {"reference", "lowrank", "triton"}
    assert path["layers"] == [f"blocks.{i}.attn" for i in range(len(path["layers"]))]
    assert len(path["layers"]) > 2


def test_a_single_image_side_means_a_square(capsys):
    assert messages(capsys, "--encoding", "alibi2d", "--img-size", "96")["image_size"] == [96, 96]


def test_layers_with_stock_attention_are_reported(capsys):
    for words, reason in (
        ((), "no encoding acts inside it"),
        (("--encoding", "sincos2d"), "no encoding acts inside it"),
        (
            ("--encoding", "alibi2d"),
            "one fixed bias on a small grid, as a dense mask cached with its positions",
        ),
    ):
        (path,) = messages(capsys, *words)["paths"]
        assert (path["backend"], path["reason"]) == (STOCK, reason)


def test_text_output(capsys):
    assert main([*MODEL, "--encoding", "rope_axial", "--dtype", "bfloat16"]) == 0
    title, layers_, backend, *lines = capsys.readouterr().out.splitlines()
    assert title == "test_vit with rope_axial, 1 x 160x160 px, bfloat16, cpu"
    assert layers_.startswith("  blocks.0.attn to blocks.")
    assert backend == "    sdpa: there is no bias"
    assert all(line.startswith("    not ") for line in lines)


def test_different_softmaxes_are_listed_separately():
    model = timm.create_model("test_vit", pos_embed="gpsa").eval()
    paths = attention_paths(model, torch.zeros(1, 3, 160, 160))
    assert [p.layer for p in paths][:4] == [
        "blocks.0.attn",
        "blocks.0.attn",
        "blocks.1.attn",
        "blocks.1.attn",
    ]
    content, position = paths[:2]
    assert content.reason == "there is no bias"
    assert position.reason == "one dense mask, cached until its parameters change"
    assert "which the bias replaces" in position.unsupported["flex"]


def test_different_layers_are_listed_separately():
    model = timm.create_model("test_vit", pos_embed="alibi2d(slopes=learned)").eval()
    model.blocks[1].attn.fused_attn = False
    paths = attention_paths(model, torch.zeros(1, 3, 160, 160))
    assert [p.backend for p in paths][:3] == ["sdpa", "reference", "sdpa"]
    assert attention_layer.attention is vispe.attention
    with pytest.raises(RuntimeError, match="channels"):
        attention_paths(model, torch.zeros(1, 1, 160, 160))
    assert attention_layer.attention is vispe.attention
    assert not model.blocks[0].attn._forward_pre_hooks


def test_invalid_arguments_raise(capsys):
    assert "doctor: no model for --encoding, --img-size." in failed(
        capsys, "--encoding", "alibi2d", "--img-size", "96"
    )
    assert "timm has no model 'test_vot'. Did you mean" in failed(capsys, "test_vot")
    assert "There is no encoding 'alibi2'" in failed(capsys, "test_vit", "--encoding", "alibi2")
    assert "ResNet" in failed(capsys, "test_resnet", "--encoding", "alibi2d")
    assert "one side or height,width in pixels, got [1, 2, 3]" in failed(
        capsys, "test_vit", "--img-size", "1,2,3"
    )
    for option, value in (("--batch-size", "2"), ("--dtype", "float16"), ("--device", "cpu")):
        assert f"doctor: no model for {option}." in failed(capsys, option, value)
    text = "test_vit does not accept images of 100 x 100 px (Input height (100) should be divisible by patch size (16))"
    assert text in failed(capsys, "test_vit", "--img-size", "100")
    assert "--batch-size must be 1 or more, got 0" in failed(capsys, "test_vit", "--batch-size", "0")
