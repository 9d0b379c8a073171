"""Rejected encodings: the reason in each error is true, and following its advice works."""

import re

import pytest
import timm
import torch
from open_clip.transformer import VisionTransformer
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer as Torchvision
from transformers import Dinov2Config, Dinov2Model, VideoMAEConfig, VideoMAEModel

import vispe
from tests.hosts.helpers import EVERY
from vispe.encodings.base import Additive, Mixing
from vispe.encodings.creation import create_encoding
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError, UnsupportedCombination, counted

HF = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
HOSTS = {
    "vit": lambda: timm.create_model("test_vit", img_size=64, depth=2),
    "eva": lambda: Eva(img_size=64, patch_size=16, embed_dim=64, depth=2, num_heads=2, use_rot_pos_emb=True),
    "naflex": lambda: NaFlexVit(NaFlexVitCfg(embed_dim=64, depth=2, num_heads=2, pos_embed_grid_size=(4, 4))),
    "swin": lambda: SwinTransformer(64, 4, window_size=4, embed_dim=64, depths=(1, 1), num_heads=(2, 4)),
    "torchvision": lambda: Torchvision(64, 16, 2, 2, 64, 128),
    "transformers": lambda: Dinov2Model(Dinov2Config(**HF)),
    "videomae": lambda: VideoMAEModel(
        VideoMAEConfig(**HF | {"hidden_size": 96}, num_frames=4, intermediate_size=64)
    ),
    "open_clip": lambda: VisionTransformer(64, 16, 64, 2, 2, 2.0, output_dim=16),
}
IN_ATTENTION = ("swin", "torchvision", "transformers", "videomae")


def reason(name, host):
    """Return the expected message; None for an accepted encoding."""
    cls, axes = encoding_class(name), 3 if host == "videomae" else 2
    if issubclass(cls, Sampler):
        return "samples positions" if host in IN_ATTENTION else "no encoding reads them"
    if host in IN_ATTENTION and issubclass(cls, Additive | Mixing):
        return "outside attention"
    if axes not in cls.ndim:
        return f"{name} supports {counted(' or '.join(map(str, cls.ndim)), 'axis')}, got the {axes}-axis grid of "
    if axes == 3 and name in ("dape", "positional_attention"):  # the encoding inside them is one of two axes
        return f"{name} supports 2 axes, got the 3-axis grid of "
    return "mixes tokens" if host == "naflex" and issubclass(cls, Mixing) else None


REFUSED = [(name, host) for host in HOSTS for name in vispe.list_encodings() if reason(name, host)]
ACCEPTED = [(name, host) for host in HOSTS for name in vispe.list_encodings() if not reason(name, host)]


@pytest.mark.parametrize("host", HOSTS)
def test_reasons_are_true_and_their_advice_works(host):
    model, works = HOSTS[host](), set()
    for name in (name for name, other in REFUSED if other == host):
        with pytest.raises(UnsupportedCombination, match=re.escape(reason(name, host))) as refused:
            vispe.convert(model, name)
        text = str(refused.value)
        assert "causal" not in text  # which would change nothing
        advised = re.search(r"such as (\w+)\.$", text)
        if advised and advised[1] not in works:
            vispe.convert(HOSTS[host](), advised[1])
            works.add(advised[1])
        if spec := re.search(r"as in '([\w+]+)'", text):
            vispe.convert(HOSTS["vit"](), spec[1])
            assert host in IN_ATTENTION or vispe.convert(HOSTS[host](), spec[1])
        assert advised or spec or "plain ViT" in text


def test_causal_encodings_of_one_axis():
    for name in ("path", "xpos"):
        with pytest.raises(UnsupportedCombination, match="Use causal=true"):
            create_encoding(name, dim=16, num_heads=2)
        create_encoding(f"{name}(causal=true)", dim=16, num_heads=2)
        with pytest.raises(UnsupportedCombination, match="2-axis grid"):
            vispe.convert(HOSTS["vit"](), f"{name}(causal=true)")


def test_too_few_heads_for_the_directions():
    for directions, heads in (("corners-none", 1), ("halves-corners-none", 2)):
        with pytest.raises(OptionError, match=r"such as directions=") as refused:
            create_encoding("lookhere", num_heads=heads, depth=2, directions=directions)
        advised = re.search(r"directions='([\w-]+)'\.$", str(refused.value))[1]
        create_encoding("lookhere", num_heads=heads, depth=2, directions=advised)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "host"), ACCEPTED if EVERY else ACCEPTED[::5])
def test_other_encodings_are_accepted(name, host):
    torch.manual_seed(0)
    vispe.convert(HOSTS[host](), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope_mixed", "t5", "gta", "pape", "seqpe", "shaw"])
def test_the_number_of_axes_defaults_to_that_of_the_grid(name, tmp_path):
    assert create_encoding(name, dim=96, num_heads=2, grid=(2, 4, 4)).ndim == (3,)
    with pytest.raises(
        (OptionError, UnsupportedCombination), match=f"{name} (supports 2 axes, got|needs axes=3 for) the"
    ):
        vispe.convert(HOSTS["videomae"](), f"{name}(axes=2)")
    torch.manual_seed(0)
    model, video = vispe.convert(HOSTS["videomae"](), name).eval(), torch.randn(1, 4, 3, 64, 64)
    expected = model(video).last_hidden_state
    with pytest.warns(UserWarning, match="saved with the encoding"):
        model.save_pretrained(tmp_path)
    loaded = vispe.from_pretrained(VideoMAEModel, tmp_path).eval()
    torch.testing.assert_close(loaded(video).last_hidden_state, expected, rtol=0, atol=0)
