"""Teacher and student follow the config, and errors are raised before anything is loaded."""

import pytest
import timm
import torch
from timm.models import Eva, VisionTransformer

import vispe
from tests.hosts.open_clip.common import tiny_tower
from tests.train.tiny import OPTIONS, TEACHER, config
from vispe.backbones.timm import patch_features
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError, UnknownName, UnsupportedHost
from vispe.train.retrofit.config import LossWeights, Probe, Stage, Student, Target, Teacher
from vispe.train.retrofit.config_checks import check
from vispe.train.retrofit.lora import LowRank, add_lora, merge_lora
from vispe.train.retrofit.student import (
    check_models,
    final_tokens,
    load_teacher,
    make_student,
    n_ablated_channels,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def backbone(model, patch_size=8):
    mean, std = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    return VisionModel(model.eval(), mean=mean, std=std, exact=False)


def eva(**options):
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    return Eva(
        **shape, dynamic_img_size=True, use_rot_pos_emb=True, rope_type="dinov3", num_reg_tokens=2, **options
    )


def test_the_teacher_is_the_timm_model_frozen():
    actual = load_teacher(TEACHER, seed=5)
    torch.manual_seed(5)
    stock = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, img_size=32, dynamic_img_size=True, **OPTIONS
    )
    assert {n: p.tolist() for n, p in stock.state_dict().items()} == {
        n: p.tolist() for n, p in actual.model.state_dict().items()
    }
    assert not actual.model.training
    assert not any(p.requires_grad for p in actual.model.parameters())
    assert (actual.patch_size, actual.size, actual.exact, actual.channels, actual.class_token) == (
        8,
        32,
        False,
        24,
        True,
    )
    assert actual.mean.flatten().tolist() == [0.5, 0.5, 0.5]


def test_mean_and_std_of_the_config_win():
    actual = load_teacher(Teacher(**{**vars(TEACHER), "mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0]}))
    torch.testing.assert_close(actual.mean, torch.tensor([0.1, 0.2, 0.3])[:, None, None])
    torch.testing.assert_close(actual.std, torch.tensor([1.0, 2.0, 3.0])[:, None, None])


@pytest.mark.parametrize("size", [(32, 32), (24, 56)])
@pytest.mark.parametrize("spec", [None, "alibi2d", "rope_mixed"])
def test_final_tokens_are_those_of_the_forward_pass(size, spec):
    model = load_teacher(TEACHER).model
    if spec:
        vispe.convert(model, spec)
    images = random(2, 3, *size)
    maps, token = final_tokens(model, images)
    features = model.forward_features(images)
    torch.testing.assert_close(maps.flatten(2).mT, features[:, 1:])
    torch.testing.assert_close(token, features[:, 0])
    torch.testing.assert_close(maps.permute(0, 2, 3, 1), patch_features(model, images))


def test_final_tokens_of_eva_leave_registers_out():
    model, images = eva().eval(), random(1, 3, 40, 24)
    maps, token = final_tokens(model, images)
    features = model.forward_features(images)
    assert maps.shape == (1, 32, 5, 3)
    torch.testing.assert_close(maps.flatten(2).mT, features[:, 3:])
    torch.testing.assert_close(token, features[:, 0])


@pytest.mark.parametrize("spec", [None, "alibi2d"])
def test_final_tokens_of_an_open_clip_tower(spec):
    tower, images = tiny_tower(output_tokens=True), random(2, 3, 24, 40)
    if spec:
        vispe.convert(tower, spec)
    tower.proj = None
    pooled, tokens = tower(images)
    maps, token = final_tokens(tower, images)
    torch.testing.assert_close(maps.flatten(2).mT, tokens)
    torch.testing.assert_close(token, pooled)


def test_a_model_without_class_token_has_none():
    model = VisionTransformer(**OPTIONS, img_size=32, num_classes=0, class_token=False, global_pool="")
    assert final_tokens(model, random(1, 3, 32, 32))[1] is None


@pytest.mark.parametrize("make", [lambda: load_teacher(TEACHER).model, eva, tiny_tower])
def test_the_student_is_the_converted_teacher(make):
    teacher = backbone(make())
    before = {n: p.clone() for n, p in teacher.model.state_dict().items()}
    student = make_student(teacher, Student("alibi2d"))
    images = random(2, 3, 24, 40)
    untouched = (
        final_tokens(teacher.model, images)[0] if not isinstance(teacher.model, VisionTransformer) else None
    )
    expected = final_tokens(vispe.convert(make().eval(), "alibi2d"), images)[0]
    torch.testing.assert_close(final_tokens(student.eval(), images)[0], expected, rtol=0, atol=0)
    assert all(torch.equal(p, before[n]) for n, p in teacher.model.state_dict().items())
    assert untouched is None or not torch.allclose(untouched, expected, atol=1e-3)
    assert all(p.requires_grad for p in student.parameters())


def test_new_weights_of_the_student_come_from_the_seed():
    teacher = load_teacher(TEACHER)
    first, second, other = (
        make_student(teacher, Student("rpb"), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    new = [name for name in first if "pos_enc" in name]
    assert new
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in new)


def test_a_random_student_shares_no_weights_with_the_teacher():
    teacher = load_teacher(TEACHER)
    student = make_student(teacher, Student(init="random"), seed=3)
    parameters = dict(teacher.model.named_parameters())
    same = [
        n
        for n, p in student.named_parameters()
        if n in parameters and torch.equal(p, parameters[n]) and p.std() > 0
    ]
    assert same == []


@pytest.mark.parametrize("make", [lambda: load_teacher(TEACHER).model, eva, tiny_tower])
def test_lora_starts_from_the_teacher_and_merges_bit_for_bit(make):
    teacher = backbone(make())
    student = make_student(teacher, Student("alibi2d(slopes=learned)", trainable="lora", rank=3), seed=1)
    plain = make_student(teacher, Student("alibi2d(slopes=learned)"), seed=1)
    images = random(2, 3, 24, 40)
    torch.testing.assert_close(
        final_tokens(student.eval(), images)[0], final_tokens(plain.eval(), images)[0], rtol=0, atol=0
    )
    trained = {n for n, p in student.named_parameters() if p.requires_grad}
    assert trained
    assert all("pos_enc" in n or n.endswith((".0.down", ".0.up")) for n in trained)
    for name, parameter in student.named_parameters():
        if name in trained:
            parameter.data += 0.1 * random(*parameter.shape)
    unmerged = final_tokens(student, images)[0]
    merge_lora(student)
    assert not any(isinstance(m, LowRank) for m in student.modules())
    assert torch.equal(final_tokens(student, images)[0], unmerged)
    assert not torch.allclose(unmerged, final_tokens(plain, images)[0], atol=1e-3)
    plain.load_state_dict(student.state_dict())
    assert torch.equal(final_tokens(plain, images)[0], unmerged)


def test_lora_takes_every_linear_layer_of_attention_and_mlp():
    names = add_lora(load_teacher(TEACHER).model, 2)
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert names == [f"blocks.{k}.{layer}.weight" for k in range(2) for layer in layers]
    assert [n.split(".", 3)[3] for n in add_lora(tiny_tower(), 2) if ".0." in n] == [
        "attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight",
    ]  # fmt: skip


def test_the_change_of_lora_is_the_product_and_keeps_its_precision():
    model = load_teacher(TEACHER).model
    weight = model.blocks[0].attn.qkv.weight.clone()
    add_lora(model, 2)
    change = model.blocks[0].attn.qkv.parametrizations.weight[0]
    change.up.data = random(72, 2)
    with torch.autocast("cpu", torch.bfloat16):
        actual = model.blocks[0].attn.qkv.weight
    torch.testing.assert_close(actual, weight + change.up @ change.down)


def test_training_the_encoding_only_freezes_other_parameters():
    student = make_student(load_teacher(TEACHER), Student("rpb", trainable="encoding"))
    for name, parameter in student.named_parameters():
        assert parameter.requires_grad == ("pos_enc" in name)


REFUSED = [
    ({"target": Target([24])}, "below 24, the number of features of vit_tiny_patch16_224, got 24"),
    ({"target": Target([-1])}, "target.blank must be one of none, auto, or a list of integers of 0 or more, got .-1"),
    ({"target": Target([3, 3])}, r"target.blank must have unique channels, got \[3, 3\]"),
    ({"target": Target("auto", count=24)}, "target.count must be below 24, .* got 24"),
    ({"target": Target([1], count=2)}, r"target.count and target.share need target.blank=auto, got \[1\]"),
    ({"target": Target("auto"), "probe": Probe(noise=0, textures=0)}, "target.blank=auto needs probe images, got none"),
    ({"target": Target("auto", share=1.5)}, "target.share needs a number above 0 and below 1, got target.share=1.5"),
    ({"stages": [Stage(32, steps=1), Stage(36, steps=2)]}, r"size must be a multiple .* got 36. Use 32 or 40"),
    ({"stages": []}, "needs stages, got none"),
    ({"stages": [Stage(32)]}, r"stages\[0\] needs either steps or epochs, got neither"),
    ({"stages": [Stage(32, steps=2, epochs=1.0)]}, "got both"),
    ({"stages": [Stage(32, steps=2, warmup_steps=2)]}, "warmup_steps must be below steps=2, got 2"),
    ({"stages": [Stage(32, steps=2, lr=-1.0)]}, "lr=-1.0"),
    ({"data": []}, "needs data, got no source"),
    ({"probe": Probe(img_size=33)}, "probe.img_size must be a multiple .* got 33"),
    ({"probe": Probe(step=3)}, "probe.step=3 leaves fewer than two patches for fitting on a 4x4 grid"),
    ({"student": Student(trainable="encoding")}, "needs an encoding with parameters, got alibi2d"),
    ({"student": Student(rank=4)}, "rank=4 needs trainable=lora, got student.trainable=all"),
    ({"student": Student(init="random", trainable="lora")}, "student.init=random needs trainable=all"),
    ({"student": Student("alibi3d")}, "3 axes"),
    ({"loss": LossWeights(0.0)}, "at least one term must have a weight above 0, got 0 for all"),
    ({"loss": LossWeights(-1.0)}, "loss.distill needs a number of 0 or more, got loss.distill=-1.0"),
    ({"ema_decay": 1.0}, "below 1"),
    ({"clip_grad": 0.0}, "clip_grad needs a number above 0, got clip_grad=0.0"),
    ({"save_steps": 0}, "save_steps needs an integer above 0, got save_steps=0"),
    ({"teacher": Teacher("vit_tiny_patch16_224", weights="random", img_size=225)}, "be a multiple .* 225. Use 224"),
    ({"teacher": Teacher("vit_tiny_patch16_224", weights="random", options={"dept": 2})}, "built with dept=2"),
    ({"teacher": Teacher("vit_tiny_patch16_224", std=[1.0, 0.0, 1.0])}, "teacher.std must be three numbers"),
    ({"teacher": Teacher("open_clip:ViT-B-32/openai", options={"a": 1})}, "teacher.options apply to timm models only"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_config_errors_precede_loading_of_weights(changes, text, monkeypatch):
    monkeypatch.setattr(torch, "load", None)
    requested = config("out", **changes)

    def checked():
        check(requested)
        check_models(requested)

    with pytest.raises((OptionError, vispe.errors.UnsupportedCombination), match=text):
        checked()


def test_unknown_models_and_files_are_named():
    for teacher, error, text in (
        (Teacher("vit_tny"), UnknownName, "has no model 'vit_tny'"),
        (Teacher("resnet18", weights="random"), UnsupportedHost, "must have blocks .* got ResNet"),
        (Teacher("swin_tiny_patch4_window7_224", weights="random"), UnsupportedHost, "must have blocks"),
        (
            Teacher("vit_tiny_patch16_224", weights="none.pt"),
            InputError,
            "teacher.weights must be a checkpoint file or 'random', got none.pt",
        ),
    ):
        with pytest.raises(error, match=text):
            check_models(config("out", teacher=teacher))


def test_a_class_token_that_is_not_there_cannot_be_learnt():
    options = {**OPTIONS, "class_token": False, "global_pool": ""}
    requested = config(
        "o", teacher=Teacher(TEACHER.name, "random", 32, options), loss=LossWeights(1.0, 0.0, 1.0)
    )
    with pytest.raises(OptionError, match="has no class token"):
        check_models(requested)


def test_numbers_of_blanked_channels():
    assert check_models(config("out")) == 24
    cases = [
        (Target(), 0),
        (Target([1, 2, 3]), 3),
        (Target("auto", count=4), 4),
        (Target("auto", share=0.1), 38),
    ]
    assert [n_ablated_channels(config("out", target=target), 384) for target, _ in cases] == [
        n for _, n in cases
    ]
    assert n_ablated_channels(config("out", target=Target("auto")), 24) == 1
