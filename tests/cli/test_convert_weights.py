"""`vispe convert-weights` on state dicts with the keys of the released checkpoints."""

import json
import re

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vispe  # noqa: F401 - timm takes specs
from tests.cases import cases
from tests.hosts.helpers import image, shake
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.hosts.checkpoints.kinds import KINDS
from vispe.hosts.checkpoints.released import convert_weights
from vispe.hosts.checkpoints.weight_files import read_weights

SIZES = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
PUBLISHED = {**SIZES, "embed_dim": 128, "num_heads": 2}


def stock(table=True, sizes=SIZES):
    torch.manual_seed(0)
    weights = shake(timm.create_model("vit_tiny_patch16_224", **sizes)).state_dict()
    return {k: v for k, v in weights.items() if table or k != "pos_embed"}


def dino_saw():
    return {**stock(False), **{f"blocks.{i}.attn.m": torch.rand(4, 1, 1) for i in range(3)}}


def rope_vit(name="freqs", table=False, **extra):
    return {**stock(table, PUBLISHED), name: torch.randn(2, 3, 64), **extra}


def irpe(shapes=None, tail="lookup_table_weight", **rpe):
    rpe = rpe or {"k": (1, 8, 50)}
    tables = {
        f"blocks.{i}.attn.rpe_{c}.{inner}{tail}": torch.randn(shape)
        for i in range(3)
        for c, shape in rpe.items()
        for inner in (("rp_rows.", "rp_cols.") if shapes == "cross" else ("",))
    }
    return {**stock(), **tables}


def peg(count=2, inner="", kernel=3):
    convs = {}
    for i in range(count):
        convs[f"pos_block.{i}.proj.{inner}weight"] = torch.randn(32, 1, kernel, kernel)
        convs[f"pos_block.{i}.proj.{inner}bias"] = torch.randn(32)
    return {**stock(False), **convs}


def build(spec, sizes=SIZES):
    return timm.create_model("vit_tiny_patch16_224", pos_embed=spec, **sizes).eval()


CASES = {
    "dino-saw": (dino_saw(), "dino-saw", "alibi2d(slopes=learned)", SIZES),
    "rope-vit": (rope_vit(), "rope-vit", "rope_mixed", PUBLISHED),
    "rope-vit-ape": (rope_vit(table=True, freqs_t_x=torch.rand(15), freqs_t_y=torch.rand(15)),
                     "rope-vit", "learn+rope_mixed", PUBLISHED),
    "rope-timm": (rope_vit("rope.freqs"), "rope-vit", "rope_mixed", PUBLISHED),
    "irpe-k": (irpe(), "deit-irpe", "learn+irpe(method=product,mode=contextual,on=k,shared=true)", SIZES),
    "irpe-qkv": (irpe(q=(1, 8, 50), k=(1, 8, 50), v=(1, 50, 8)),
                 "deit-irpe", "learn+irpe(method=product,mode=contextual,on=qkv,shared=true)", SIZES),
    "irpe-heads": (irpe(q=(4, 8, 82)),
                   "deit-irpe", "learn+irpe(method=euclidean,mode=contextual,on=q,shared=false)", SIZES),
    "irpe-cross": (irpe("cross", k=(1, 8, 82)),
                   "deit-irpe", "learn+irpe(method=cross,mode=contextual,on=k,shared=true)", SIZES),
    "irpe-bias": (irpe(tail="lookup_table_bias", k=(4, 134)),
                  "deit-irpe", "learn+irpe(method=quantization,mode=bias,on=k,shared=false)", SIZES),
    "cpvt": (peg(), "cpvt", "peg(first=2,kernel_size=3)", SIZES),
    "cpvt-5": (peg(1, kernel=5), "cpvt", "peg(first=1,kernel_size=5)", SIZES),
    "twins": (peg(2, "0."), "twins", "peg(first=2,kernel_size=3)", SIZES),
}  # fmt: skip


@cases("case", CASES)
def test_converted_weights_load_strictly_and_give_equal_outputs(case, tmp_path, capsys):
    weights, kind, spec, sizes = CASES[case]
    torch.save(weights, tmp_path / "theirs.pth")
    assert (
        main(["convert-weights", str(tmp_path / "theirs.pth"), str(tmp_path / "ours.safetensors"), "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == kind
    assert report["pos_embed"] == [spec]
    ours = load_file(tmp_path / "ours.safetensors")
    assert report["kept"] + len({new for _, new in report["renamed"]}) == len(ours)
    assert {old for old, _ in report["renamed"]} | set(report["dropped"]) == set(weights) - set(ours)
    assert {new for _, new in report["renamed"]} == set(ours) - set(weights)
    assert all("pos_enc." in new for _, new in report["renamed"])
    assert all(torch.equal(ours[k], weights[k]) for k in set(ours) & set(weights))
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata()["vispe"] == spec
    model, direct = build(spec, sizes), build(spec, sizes)
    model.load_state_dict(ours)
    direct.load_state_dict(weights)
    assert torch.equal(model(image()), direct(image()))
    zeroed = {**ours, report["renamed"][0][1]: torch.zeros_like(ours[report["renamed"][0][1]])}
    model.load_state_dict(zeroed)
    assert not torch.equal(model(image()), direct(image())), "the outputs do not depend on the weights"


def test_values_are_converted_to_the_right_parameters():
    weights, _, _, _ = CASES["rope-vit"]
    actual = convert_weights(weights).weights
    for i in range(3):
        assert torch.equal(actual[f"blocks.{i}.attn.pos_enc.freqs"], weights["freqs"][:, i].reshape(2, 2, 32))
    weights, _, _, _ = CASES["dino-saw"]
    actual = convert_weights(weights).weights
    for i in range(3):
        assert torch.equal(actual[f"blocks.{i}.attn.pos_enc.slope"], weights[f"blocks.{i}.attn.m"].flatten())
    weights, _, _, _ = CASES["twins"]
    actual = convert_weights(weights).weights
    assert torch.equal(actual["pos_enc.proj.1.weight"], weights["pos_block.1.proj.0.weight"])
    assert "pos_block.1.proj.0.weight" in weights, "the input was modified"


def test_a_common_prefix_of_all_names_is_preserved():
    weights = {f"module.backbone.{k}": v for k, v in irpe().items()}
    result = convert_weights(weights)
    assert ("module.backbone.blocks.2.attn.rpe_k.lookup_table_weight",
            "module.backbone.blocks.2.attn.pos_enc.rpe_k.lookup_table_weight") in result.renamed  # fmt: skip
    assert result.specs[0].startswith("learn+irpe")
    assert all(name.startswith("module.backbone.") for name in result.weights)
    result = convert_weights({f"net.{k}": v for k, v in rope_vit(freqs_t_x=torch.rand(3)).items()})
    assert result.dropped == ("net.freqs_t_x",)
    assert result.renamed[0] == ("net.freqs", "net.blocks.0.attn.pos_enc.freqs")


@cases("case", ["dino-saw", "rope-vit", "irpe-k", "cpvt"])
def test_from_selects_the_kind_of_checkpoint(case, tmp_path, capsys):
    weights, kind, _, _ = CASES[case]
    save_file(weights, tmp_path / "theirs.safetensors")
    words = ["convert-weights", str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.pt")]
    assert main([*words, "--from", kind]) == 0
    assert f"is a {kind} checkpoint" in capsys.readouterr().out
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert set(ours) == set(convert_weights(weights).weights)
    other_kind = "rope-vit" if kind != "rope-vit" else "dino-saw"
    assert main([*words, "--force", "--from", other_kind]) == 2
    assert (
        f"no weights of a {other_kind} encoding, which have names such as {KINDS[other_kind].example}"
        in capsys.readouterr().err
    )
    assert main([*words, "--force", "--from", "rope-vitt"]) == 2
    assert "convert-weights: --from must be 'dino-saw' or" in capsys.readouterr().err


def test_the_report_lists_renamed_dropped_and_skipped_entries(tmp_path, capsys):
    content = {"model": rope_vit(freqs_t_x=torch.rand(3)), "epoch": 3, "optimizer": {"lr": 0.1}}
    torch.save(content, tmp_path / "a.pth")
    assert main(["convert-weights", str(tmp_path / "a.pth"), str(tmp_path / "new" / "b.safetensors")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"{tmp_path / 'a.pth'} is a rope-vit checkpoint",
        *(f"  freqs -> blocks.{i}.attn.pos_enc.freqs" for i in range(3)),
        "  freqs_t_x dropped: computed from the grid",
        "  epoch skipped: not part of the state dict",
        "  optimizer skipped: not part of the state dict",
        "  2 heads, of 64 channels each, as in the published models",
        f"{tmp_path / 'new' / 'b.safetensors'}: 3 entries renamed, {len(stock(False))} unchanged",
        "load it with pos_embed='rope_mixed'",
    ]


def failed(capsys, *words):
    assert main(["convert-weights", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    source, target = tmp_path / "a.pth", tmp_path / "b.pth"
    torch.save(dino_saw(), source)
    target.write_bytes(b"mine")
    assert "exists; add --force to overwrite it" in failed(capsys, source, target)
    assert target.read_bytes() == b"mine"
    assert "is an input and would be overwritten" in failed(capsys, source, source, "--force")
    torch.save({"blocks.0.attn.m": torch.zeros(4, 1, 1)}, tmp_path / "bad.pth")
    failed(capsys, tmp_path / "bad.pth", target, "--force")
    assert target.read_bytes() == b"mine", "only a success replaces the file"
    assert main(["convert-weights", str(source), str(target), "--force"]) == 0
    assert "blocks.0.attn.pos_enc.slope" in torch.load(target, weights_only=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pth", "b.pth", "bad.pth"]


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_unreadable_files_raise(tmp_path, capsys):
    target = tmp_path / "out.pt"
    assert f"convert-weights: file {tmp_path / 'no.pth'} does not exist." in failed(
        capsys, tmp_path / "no.pth", target
    )
    torch.save({"state_dict": dino_saw(), "code": Code()}, tmp_path / "code.pth")
    assert "other objects can run code" in failed(capsys, tmp_path / "code.pth", target)
    for name in ("bad.pth", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        assert "code.pth" not in (err := failed(capsys, tmp_path / name, target))
        assert name in err
    torch.save(dino_saw(), tmp_path / "whole.pth")
    (tmp_path / "half.pth").write_bytes((tmp_path / "whole.pth").read_bytes()[:9000])
    assert "half.pth" in failed(capsys, tmp_path / "half.pth", target)
    torch.save([1, 2], tmp_path / "list.pth")
    assert "expected a state dict, got list" in failed(capsys, tmp_path / "list.pth", target)
    torch.save({"epoch": 1}, tmp_path / "epoch.pth")
    assert "expected a state dict, got epoch. Pass its key as --key." in failed(
        capsys, tmp_path / "epoch.pth", target
    )
    (tmp_path / "a.npz").write_bytes(b"x")
    assert "must end in .safetensors" in failed(capsys, tmp_path / "a.npz", target)
    assert "must end in .safetensors" in failed(capsys, tmp_path / "whole.pth", tmp_path / "out.npz")
    assert not target.exists()


def test_key_selects_the_state_dict(tmp_path, capsys):
    torch.save({"ema": dino_saw(), "model": stock()}, tmp_path / "a.pth")
    words = [tmp_path / "a.pth", tmp_path / "b.pt"]
    assert "not those of a supported released checkpoint" in failed(capsys, *words)
    assert "has no state dict 'emo', got the entries ema, model" in failed(capsys, *words, "--key", "emo")
    assert main(["convert-weights", *map(str, words), "--key", "ema"]) == 0
    assert read_weights(tmp_path / "a.pth", "ema")[1] == ["model"]


def test_unsupported_weights_raise():
    with pytest.raises(InputError, match=re.escape("got the names cls_token, ")):
        convert_weights({k: v for k, v in stock().items() if k != "pos_embed"})
    with pytest.raises(InputError, match="such as constant slopes or axial RoPE, need no conversion"):
        convert_weights(stock())
    with pytest.raises(
        OptionError, match=r"kind must be one of .*, got 'rope_vit'\. Did you mean 'rope-vit'"
    ):
        convert_weights(rope_vit(), "rope_vit")
    with pytest.raises(InputError, match=r"names of dino-saw and deit-irpe. Pass `kind`"):
        convert_weights({**irpe(), **dino_saw()})
    with pytest.raises(InputError, match=r"already have names of vispe \(pos_enc\)"):
        convert_weights(convert_weights(dino_saw()).weights)
    with pytest.raises(
        InputError, match=r"a ViT with one width, got a model with stages \(blocks.0.1.attn.q.weight"
    ):
        convert_weights({**peg(), "blocks.0.1.attn.q.weight": torch.zeros(3, 3)})
    with pytest.raises(InputError, match="m has no blocks of a ViT"):
        convert_weights({k: v for k, v in dino_saw().items() if ".qkv." not in k})
    with pytest.raises(InputError, match=r"must form one ViT of width 32, got the blocks \[0, 2\]"):
        convert_weights({k: v for k, v in dino_saw().items() if not k.startswith("blocks.1.")})
    with pytest.raises(InputError, match=r"No published deit-irpe .* shape \(1, 8, 51\)"):
        convert_weights(irpe(k=(1, 8, 51)))
    with pytest.raises(InputError, match="No published dino-saw encoding"):
        convert_weights({k: v for k, v in dino_saw().items() if k != "blocks.1.attn.m"})
    weights = irpe(q=(1, 8, 50), k=(1, 8, 50))
    del weights["blocks.1.attn.rpe_q.lookup_table_weight"]
    with pytest.raises(InputError, match="No published deit-irpe encoding"):
        convert_weights(weights)
    weights = peg()
    del weights["pos_block.1.proj.bias"]
    with pytest.raises(InputError, match="No published cpvt encoding"):
        convert_weights(weights)


def test_num_heads_and_spec_that_weights_do_not_determine():
    weights = {**stock(False), "freqs": torch.randn(2, 3, 16)}
    with pytest.raises(
        InputError,
        match=r"number of heads cannot be inferred from the weights, got the width 32\. Pass `num_heads`",
    ):
        convert_weights(weights)
    result = convert_weights(weights, num_heads=4)
    assert result.weights["blocks.0.attn.pos_enc.freqs"].shape == (2, 4, 4)
    assert result.notes == ()
    with pytest.raises(InputError, match=r"num_heads must be 4, that of blocks.0.attn.m, got 2"):
        convert_weights(dino_saw(), num_heads=2)
    large = irpe(k=(1, 8, 290))
    result = convert_weights(large, spec="irpe(ratio=4.0)")
    assert result.specs == ("learn+irpe(ratio=4.0)",)
    build(result.specs[0]).load_state_dict(result.weights)
    with pytest.raises(OptionError, match="must be a single encoding"):
        convert_weights(large, spec="irpe+alibi2d")
    with pytest.raises(InputError, match="No published"):
        convert_weights(large, spec="irpe(ratio=3.0)")


@cases("qkv_bias", [False, True])
@cases("pool", ["token", "avg"])
def test_converted_convit_gives_equal_outputs(qkv_bias, pool):
    """The ConViT of timm, whose gated blocks have no class token, against a ViT with its weights."""
    sizes = {"img_size": 40, "patch_size": 8, "depth": 4, "num_classes": 5, "qkv_bias": qkv_bias}
    theirs = timm.create_model("convit_tiny", **sizes, embed_dim=8, num_heads=4, local_up_to_layer=2)
    theirs = shake(theirs).double().eval()
    result = convert_weights(theirs.state_dict())
    assert result.kind == "convit"
    assert result.specs == ("learn+gpsa(layers=[0,1],late_prefix=true)",)
    assert result.notes == (
        f"load it into a ViT with embed_dim=32, num_heads=4, qkv_bias={qkv_bias}, no_embed_class=True",
    )
    assert ("blocks.1.attn.v.weight", "blocks.1.attn.qkv.weight") in result.renamed
    options = {"embed_dim": 32, "num_heads": 4, "no_embed_class": True, "global_pool": pool, "fc_norm": False}
    fused = (
        timm.create_model("vit_tiny_patch16_224", pos_embed=result.specs[0], **sizes, **options)
        .double()
        .eval()
    )
    direct = (
        timm.create_model("vit_tiny_patch16_224", pos_embed=result.specs[0], **sizes, **options)
        .double()
        .eval()
    )
    fused.load_state_dict(result.weights)
    direct.load_state_dict(theirs.state_dict())
    theirs.global_pool = pool
    x = torch.randn(2, 3, 40, 40, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(fused.forward_features(x), theirs.forward_features(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fused(x), theirs(x), rtol=1e-10, atol=1e-10)
    assert torch.equal(fused(x), direct(x))
    ours, expected = (
        torch.autograd.grad(m.forward_features(x).square().sum(), x)[0] for m in (fused, theirs)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)
    intermediates = zip(
        fused.forward_intermediates(x, norm=True)[1],
        theirs.forward_intermediates(x, norm=True)[1],
        strict=True,
    )
    for converted, original in intermediates:
        torch.testing.assert_close(converted, original, rtol=1e-10, atol=1e-10)
