"""The table of encodings and hosts: every cell is correct, and unsupported families are rejected with a reason."""

import copy

import pytest
import timm
import torch
from timm.models import Eva, SwinTransformer, VisionTransformer

import vispe
from tests.hosts.helpers import SHAPE, close, image
from tests.hosts.packed import naflex, pack, sample_of
from vispe.cli.main import main
from vispe.encodings.metadata import list_encodings
from vispe.errors import UnsupportedHost, VispeError
from vispe.hosts.support_matrix import HOSTS, support, support_table
from vispe.hosts.timm import patch_constructors

WIDE = {**SHAPE, "embed_dim": 96}
SIZES = [(3, 5), (4, 2)]
SAMPLERS = list_encodings(kind="positions")


def images(cls):
    def run(name):
        torch.manual_seed(0)
        model = cls(**WIDE).eval()
        before = copy.deepcopy(model.state_dict())
        try:
            assert vispe.convert(model, name)(image()).isfinite().all()
        except VispeError:
            assert type(model) is cls, "a refusal comes before the first change"
            assert list(before) == list(model.state_dict())
            raise

    return run


def naflex_images(name):
    assert vispe.convert(naflex(embed_dim=96), name)(image()).isfinite().all()


def naflex_packed(name):
    # in float64: phases of tapa multiply the rounding of other matrix products
    model, batch = vispe.convert(naflex(embed_dim=96), name).double(), pack(SIZES)
    batch["patches"] = batch["patches"].double()
    close(model(batch), torch.cat([model(sample_of(batch, i)) for i in range(2)]))


def open_clip_tower(name):
    transformer = pytest.importorskip("open_clip.transformer")
    tower = transformer.VisionTransformer(
        image_size=(24, 40), patch_size=8, width=96, layers=2, heads=4, mlp_ratio=2.0, output_dim=8
    ).eval()
    assert vispe.convert(tower, name)(image()).isfinite().all()


def own_attention(name):
    axes = vispe.encoding_info(name.partition("+")[0]).ndim
    shape = {1: (12,), 2: (3, 4), 3: (3, 2, 2)}[2 if 2 in axes else axes[-1]]
    needs = name.startswith(("rpb", "decomposed", "shaw"))  # only a host knows its grid
    layer = vispe.Attention(96, 4, {"name": name, "grid": shape} if needs else name)
    assert layer(torch.randn(2, 12, 96), shape).isfinite().all()


def towers(name):
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    shape = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.Dinov2Model(transformers.Dinov2Config(image_size=24, patch_size=8, **shape)).eval()
    assert vispe.convert(model, name)(image()).last_hidden_state.isfinite().all()


def windows(name):
    model = SwinTransformer(
        64, window_size=4, embed_dim=96, depths=(2,), num_heads=(4,), num_classes=3
    ).eval()
    assert vispe.convert(model, name)(image(2, 3, 64, 64)).isfinite().all()


def other_families(name):
    timm.create_model("beit_base_patch16_224", pos_embed=name)


RUN = {
    "vit": images(VisionTransformer),
    "eva": images(Eva),
    "naflex": naflex_images,
    "packed": naflex_packed,
    "open_clip": open_clip_tower,
    "towers": towers,
    "windows": windows,
    "attention": own_attention,
    "other": other_families,
}


@pytest.mark.filterwarnings("ignore:shift has no effect")  # nor harm
@pytest.mark.parametrize("extent", ["quarter", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("host", HOSTS)
def test_every_cell_agrees_with_the_table(host, extent):
    """Test a quarter of the cells, with other encodings for each host, or all."""
    wrong = {}
    names = list_encodings()
    for name in names[[*HOSTS].index(host) % 4 :: 4] if extent == "quarter" else names:
        reason = support(name)[host]
        try:
            RUN[host](f"{name}+rope_axial" if name in SAMPLERS else name)
        except VispeError as error:
            if reason is None:
                wrong[name] = f"said yes, but {type(error).__name__}: {error}"
        else:
            if reason is not None:
                wrong[name] = f"said {reason!r}, but it runs"
    assert not wrong


def test_the_table_is_printed(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line for line in text.splitlines() if line and line[0] != " "}
    for name, cells in support_table():
        assert rows[name].count("yes") == sum(reason is None for reason in cells.values())
    assert all(f"  {host:<10} {about}" in text for host, about in HOSTS.items())
    assert main(["info", "peg"]) == 0
    assert "packed     no: it mixes neighbours" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert '"alibi2d"' in capsys.readouterr().out


FAMILIES = [
    "beit_base_patch16_224", "swinv2_cr_tiny_224", "vit_relpos_small_patch16_224",
    "hiera_tiny_224", "mvitv2_tiny", "cait_xxs24_224", "resnet18",
    "vit_srelpos_small_patch16_224", "convnext_atto", "pvt_v2_b0", "davit_tiny",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_are_rejected_before_any_change_with_a_suggestion(name):
    with pytest.raises(
        UnsupportedHost,
        match=r"pos_embed='alibi2d' is not supported\. \w+ does not support .*: it .* Use 'vit_base_patch16_224'",
    ):
        timm.create_model(name, pos_embed="alibi2d")
    with torch.device("meta"):
        model = timm.create_model(name)
    cls, keys = type(model), list(model.state_dict())
    with pytest.raises(
        UnsupportedHost,
        match=rf"unsupported model, got a {cls.__name__} of timm\. "
        rf"{cls.__name__} does not support .* Use 'vit_base_patch16_224'",
    ):
        vispe.convert(model, "alibi2d")
    assert type(model) is cls
    assert list(model.state_dict()) == keys
    with pytest.raises(UnsupportedHost, match="must be a converted one"):
        vispe.restore(model)


def test_suggested_models_exist_and_stock_errors_return_after_uninstall():
    for name in ("vit_base_patch16_224", "vit_base_patch16_rope_224", "naflexvit_base_patch16_gap"):
        with torch.device("meta"):
            assert timm.create_model(name, pos_embed="alibi2d", depth=1).vispe.spec
    assert type(timm.create_model("resnet18", pos_embed=None)).__name__ == "ResNet"
    patch_constructors.uninstall()
    try:
        with pytest.raises(TypeError, match="pos_embed"):
            timm.create_model("resnet18", pos_embed="alibi2d")
    finally:
        patch_constructors.install()
