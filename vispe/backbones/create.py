"""timm models by name: built, and their weights found on disk or asked for once."""

from __future__ import annotations

import threading
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import torch

from vispe.backbones.downloads import check_allowed
from vispe.errors import InputError, OptionError, UnknownName, UnsupportedHost, did_you_mean

_PATIENCE = 3.0  # seconds to wait for the model hub before saying that it cannot be reached


def check_name(name: str) -> None:
    """Raise `UnknownName` unless timm has a model of this name, or it names a folder or a model of the hub."""
    import timm  # takes seconds, and is needed for models of timm alone

    known = timm.list_models()
    if name.startswith(("local-dir:", "hf-hub:", "hf_hub:")) or timm.is_model(name):
        return
    hint = did_you_mean(name, known) or f" timm has {len(known)} models, such as vit_small_patch14_dinov2."
    raise UnknownName(f"timm has no model {name!r}.{hint}")


def create(name: str, pos_embed: str | None, weights: str | None) -> Any:
    """Build the model and give it its weights."""
    import timm

    options: dict[str, Any] = {"num_classes": 0}
    if pos_embed is not None:
        options["pos_embed"] = pos_embed
    if name.startswith("local-dir:"):
        if weights not in (None, "random"):
            raise OptionError(
                f"weights={weights!r} and the model folder {name!r} both name weights; give one."
            )
        return _build(name, pretrained=weights is None, **options)
    if name.startswith(("hf-hub:", "hf_hub:")):
        if not _hub_cached(name.partition(":")[2]):
            check_hub(name)
        return _build(name, pretrained=weights is None, **options)
    if weights is None:
        config = timm.get_pretrained_cfg(name)
        if config is None or not config.has_weights:
            raise InputError(
                f"timm has no pretrained weights for {name}; give a checkpoint with --weights FILE."
            )
        found = _cached(config)
        if found is None:
            check_hub(name)
            return _build(name, pretrained=True, **options)
        weights = str(found)
    if weights == "random":
        return _build(name, pretrained=False, **options)
    from vispe.backbones.weights import built_with  # brings timm

    return built_with(weights, name, lambda: _build(name, pretrained=False, **options))


def _build(name: str, **options: Any) -> Any:
    """Create the model, with token grids of any size where the architecture allows them."""
    import timm

    try:
        return timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError as error:
        if "dynamic_img_size" not in str(error):
            raise UnsupportedHost(f"timm cannot build {name}: {error}.") from error
    try:
        return timm.create_model(name, **options)
    except TypeError as error:
        raise UnsupportedHost(f"timm cannot build {name} with {sorted(options)}: {error}.") from error


def _cached(config: Any) -> Path | None:
    """Find pretrained weights on disk, without asking the network."""
    if config.hf_hub_id:
        from huggingface_hub import try_to_load_from_cache

        for name in (config.hf_hub_filename, "model.safetensors", "pytorch_model.bin"):
            found = try_to_load_from_cache(config.hf_hub_id, name) if name else None
            if isinstance(found, str):
                return Path(found)
    if config.url:
        found = Path(torch.hub.get_dir()) / "checkpoints" / Path(config.url).name
        return found if found.is_file() else None
    return None


def _hub_cached(repo: str) -> bool:
    """Tell whether the card and the weights of a model of the hub are on disk."""
    from huggingface_hub import try_to_load_from_cache

    found = [
        try_to_load_from_cache(repo, name)
        for name in ("config.json", "model.safetensors", "pytorch_model.bin")
    ]
    return isinstance(found[0], str) and any(isinstance(one, str) for one in found[1:])


def check_hub(name: str) -> None:
    """Say at once when weights can only come from a network that is not there."""
    from huggingface_hub import constants

    check_allowed(f"the pretrained weights of {name} are")
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if reason is not None:
        raise InputError(
            f"the pretrained weights of {name} are not on this disk and {reason}; give a checkpoint with --weights "
            f"FILE, choose a model that is on this disk ({on_disk()}), or use --features filters."
        )


def unreachable(address: str) -> str | None:
    """Ask an address for a sign of life; return the reason when there is none within `_PATIENCE` seconds.

    The question is asked in a thread, since looking up a name in a broken network cannot be given a time limit.
    """
    found = [f"no answer within {_PATIENCE:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE).close()
            found.clear()
        except urllib.error.HTTPError:
            found.clear()  # it answered
        except OSError as error:
            found[0] = str(getattr(error, "reason", error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return f"{address} cannot be reached ({found[0]})" if found else None


def on_disk() -> str:
    """Return the names of timm's models whose weights are on this disk, or 'none'."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        with warnings.catch_warnings(action="ignore"):
            repos = [r.repo_id for r in scan_cache_dir().repos if r.repo_id.startswith("timm/")]
    except CacheNotFound:
        repos = []
    return ", ".join(sorted(r.removeprefix("timm/") for r in repos)) or "none"


def geometry(model: Any) -> tuple[bool, int, tuple[int, int]]:
    """Return whether any input size works, the stride of the tokens, and the size that always works."""
    embed = getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None) or model.pretrained_cfg["input_size"][1:]
    if embed is not None and getattr(embed, "patch_size", None) is not None and hasattr(model, "blocks"):
        patch = embed.patch_size if isinstance(embed.patch_size, tuple) else (embed.patch_size,) * 2
        if patch[0] != patch[1]:
            raise UnsupportedHost(f"the model has patches of {patch} px; square ones are needed.")
        return bool(getattr(model, "dynamic_img_size", False)), int(patch[0]), tuple(size)
    stride = int(model.feature_info[-1]["reduction"])
    return embed is None, stride, tuple(size)
