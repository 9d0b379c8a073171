"""Search for CLIP weights, and errors if they are missing."""

import json

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from tests.segment.text.common import VISION, VOCABULARY, save, stock, write_folder
from vispe.backbones.local.clip_checkpoints import Checkpoint
from vispe.errors import InputError, OptionError, UnknownName
from vispe.segment.text.readouts import parse_readout
from vispe.segment.text.weights import MODEL, TAG, build, find_weights, on_disk, tokenizer

NACLIP = parse_readout("naclip")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "vispe.backbones.hub.unreachable", lambda address: f"{address} cannot be reached (gone)"
    )
    return tmp_path / "hub"


def put_in_cache(cache, repo, name, content=b""):
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("0" * 40)
    path = folder / "snapshots" / ("0" * 40) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_missing_default_weights_raise_and_list_alternatives(cache):
    assert on_disk() == []
    with pytest.raises(
        InputError,
        match=rf"the checkpoint {MODEL}:{TAG} is not on this disk and https://\S+ cannot be reached \(gone\); no other "
        r"weights are on this disk\. Pass a checkpoint file with `weights`, or use `weights=random`",
    ):
        find_weights(MODEL, None)
    put_in_cache(cache, "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "open_clip_model.safetensors")
    with pytest.raises(InputError, match=r"on this disk are: ViT-B-32:laion2b_s34b_b79k"):
        find_weights(MODEL, None)


def test_offline_mode_is_respected(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="is not on this disk and HF_HUB_OFFLINE is set"):
        find_weights("ViT-B-32", "openai")


def test_cached_weights_are_loaded_without_network(cache, tmp_path):
    path = put_in_cache(cache, "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "open_clip_pytorch_model.bin")
    actual = find_weights(MODEL, None)
    assert (actual.name, actual.weights, actual.path) == (MODEL, TAG, path)
    assert actual.config["mean"] == open_clip.OPENAI_DATASET_MEAN
    better = put_in_cache(cache, "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "open_clip_model.safetensors")
    assert find_weights(MODEL, TAG).path == better
    old = tmp_path / "home" / ".cache" / "clip" / "ViT-L-14.pt"
    old.parent.mkdir(parents=True)
    old.touch()
    assert find_weights("ViT-L-14", "openai").path == old
    assert on_disk()[:2] == [f"{MODEL}:{TAG}", "ViT-L-14:openai"]


def test_the_only_tag_on_disk_is_used(cache):
    put_in_cache(cache, "timm/vit_base_patch32_clip_224.openai", "open_clip_model.safetensors")
    assert find_weights("ViT-B-32", None).weights == "openai"
    put_in_cache(cache, "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "open_clip_model.safetensors")
    with pytest.raises(
        OptionError, match=r"ViT-B-32 are ambiguous.* it has openai, laion2b_s34b_b79k, and several are on"
    ):
        find_weights("ViT-B-32", None)
    with pytest.raises(
        OptionError, match=r"ViT-L-14 are ambiguous.* it has openai, .* and none of them is on disk"
    ):
        find_weights("ViT-L-14", None)


def test_unknown_names_raise():
    with pytest.raises(UnknownName, match=r"open_clip has no model 'ViT-B-61'. Did you mean 'ViT-B-16"):
        find_weights("ViT-B-61", None)
    with pytest.raises(
        UnknownName,
        match=r"open_clip has no model 'zzz'. open_clip has \d+, such as ViT-B-16. Weights on disk",
    ):
        find_weights("zzz", None)
    with pytest.raises(
        UnknownName,
        match=r"a file or a tag of ViT-B-32, got 'opena'. Did you mean 'openai'\? Its tags",
    ):
        find_weights("ViT-B-32", "opena")


def test_model_folders_are_searched_for_checkpoints(tmp_path):
    with pytest.raises(
        InputError, match=r"nowhere must be a model folder of open_clip, but open_clip_config.json cannot"
    ):
        find_weights("local-dir:nowhere", None)
    folder = write_folder(tmp_path / "tiny", VISION)
    with pytest.raises(
        InputError, match=r"contains no open_clip_model.safetensors, got the checkpoints none"
    ):
        find_weights(f"local-dir:{folder}", None)
    assert find_weights(f"local-dir:{folder}", "random").path is None
    (folder / "epoch_3.pt").touch()
    assert find_weights(f"local-dir:{folder}", None).path == folder / "epoch_3.pt"
    (folder / "epoch_4.pt").touch()
    with pytest.raises(InputError, match=r"got the checkpoints epoch_3.pt, epoch_4.pt\."):
        find_weights(f"local-dir:{folder}", None)
    assert find_weights(f"local-dir:{folder}", str(folder / "epoch_4.pt")).path == folder / "epoch_4.pt"
    with pytest.raises(InputError, match=r"weights must be a checkpoint file, got .*epoch_9.pt"):
        find_weights(f"local-dir:{folder}", "epoch_9.pt")
    save(stock(folder), folder)
    assert find_weights(f"local-dir:{folder}", None).path == folder / "open_clip_model.safetensors"
    (folder / "open_clip_config.json").write_text("{}")
    with pytest.raises(InputError, match="has no model_cfg"):
        find_weights(f"local-dir:{folder}", None)


def test_hub_models_are_read_from_the_cache(cache, tmp_path):
    with pytest.raises(InputError, match="the model hf-hub:someone/tiny is not on this disk and"):
        find_weights("hf-hub:someone/tiny", None)
    folder = write_folder(tmp_path / "tiny", VISION)
    save(stock(folder), folder)
    files = [put_in_cache(cache, "someone/tiny", p.name, p.read_bytes()) for p in folder.iterdir()]
    actual = find_weights("hf-hub:someone/tiny", None)
    assert actual.path in files
    assert actual.weights is None
    model = build(actual, None, NACLIP, 0)
    expected = stock(folder).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_config_of_a_tag_is_applied(tmp_path):
    folder = write_folder(tmp_path, VISION)
    config = {"quick_gelu": True, "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)}
    model = build(Checkpoint(f"local-dir:{folder}", "random", None, config), None, NACLIP, 0)
    assert type(model.visual.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
    assert tuple(model.visual.preprocess_cfg["mean"]) == (0.1, 0.2, 0.3)
    plain = build(Checkpoint(f"local-dir:{folder}", "random", None, {}), None, NACLIP, 0)
    assert type(plain.visual.transformer.resblocks[0].mlp.gelu).__name__ == "GELU"
    assert tuple(plain.visual.preprocess_cfg["std"]) == (0.2, 0.3, 0.25)


@pytest.mark.parametrize("spec", ["alibi2d", "alibi2d(slopes=learned)"])
def test_checkpoints_of_stock_and_of_converted_towers_load(tmp_path, spec):
    folder = write_folder(tmp_path, VISION)
    model = stock(folder)
    save(model, folder)
    actual = find_weights(f"local-dir:{folder}", None)
    from_stock = build(actual, spec, NACLIP, 0)
    assert from_stock.visual.positional_embedding is None
    assert torch.equal(from_stock.visual.proj, model.visual.proj)
    with torch.no_grad():
        for name, parameter in from_stock.named_parameters():
            if "pos_enc" in name:
                parameter.fill_(0.25)
    save_file(from_stock.state_dict(), str(tmp_path / "own.safetensors"))
    reloaded = build(find_weights(f"local-dir:{folder}", str(tmp_path / "own.safetensors")), spec, NACLIP, 1)
    state = reloaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in from_stock.state_dict().items())
    assert ("learned" in spec) == any("pos_enc" in key for key in state)


def test_mismatched_checkpoints_raise(tmp_path):
    folder = write_folder(tmp_path, VISION)
    save_file({"a": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    (tmp_path / "broken.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    for name in ("other.safetensors", "broken.pt", "cut.safetensors"):
        with pytest.raises(
            InputError,
            match=rf"{name} does not fit the model \(.*\)\. Check the name of the model, local-dir:",
        ):
            build(find_weights(f"local-dir:{folder}", str(tmp_path / name)), None, NACLIP, 0)


def test_invalid_configurations_raise(tmp_path):
    folder = write_folder(tmp_path, {**VISION, "width": 33})
    with pytest.raises(InputError, match=r"open_clip cannot build local-dir:\S+ \("):
        build(find_weights(f"local-dir:{folder}", "random"), None, NACLIP, 0)


def test_tokenizers_load_from_folders_and_missing_ones_raise(tmp_path):
    folder = write_folder(tmp_path, VISION, vocabulary=VOCABULARY)
    assert tokenizer(f"local-dir:{folder}").context_length == 24
    with pytest.raises(
        InputError, match="the tokenizer timm/ViT-B-16-SigLIP of ViT-B-16-SigLIP is not on this disk"
    ):
        tokenizer("ViT-B-16-SigLIP")


def test_root_logger_is_unchanged(tmp_path, caplog):
    import logging

    folder = write_folder(tmp_path, VISION)
    root = logging.getLogger()
    handlers_before = list(root.handlers)
    build(find_weights(f"local-dir:{folder}", "random"), None, NACLIP, 0)
    assert root.handlers == handlers_before
    assert json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]["embed_dim"] == 16
