"""open_clip models whose image tower supports patch readouts, and their tokenizers."""

from __future__ import annotations

from typing import Any

import open_clip
import torch
from torch import nn

from vispe.backbones import clip_weights
from vispe.backbones.clip_weights import quiet
from vispe.backbones.hub import cached, check_reach
from vispe.backbones.local.clip_checkpoints import FOLDER, MODEL, TAG, Checkpoint, find_weights, on_disk
from vispe.errors import InputError, short
from vispe.segment.text.readouts import Readout
from vispe.segment.text.towers import prepare

__all__ = ["MODEL", "TAG", "build", "find_weights", "on_disk", "tokenizer"]


def build(checkpoint: Checkpoint, pos_embed: str | None, readout: Readout, seed: int) -> nn.Module:
    """Build a model on the CPU, convert its image tower for a readout and load its weights.

    Args:
        checkpoint: the weights.
        pos_embed: encoding that replaces that of the image tower.
        readout: the readout to be used.
        seed: seed of random weights, and of parameters missing in the checkpoint.

    Raises:
        InputError: a checkpoint that does not match the model.
        UnsupportedHost, UnsupportedCombination: a tower without patch readout.
    """
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = clip_weights.build(checkpoint, load=False)
        # the converted tower loads checkpoints of both the stock and the converted model
        prepare(model, pos_embed, readout)
        if checkpoint.path is not None:
            clip_weights.load_checkpoint(model, checkpoint)
    return model.eval().requires_grad_(False)


def tokenizer(name: str) -> Any:
    """Return the tokenizer of a model; `name` is the name used by open_clip.

    Raises:
        InputError: a tokenizer of the hub that is not on this disk, without network.
    """
    config = (open_clip.get_model_config(name) or {}).get("text_cfg", {})
    source = config.get("hf_tokenizer_name")
    if (
        source
        and not name.startswith(FOLDER)
        and not cached(source, "tokenizer_config.json", "tokenizer.json")
    ):
        check_reach(f"the tokenizer {source} of {name} is", on_disk)
    with quiet():
        try:
            return open_clip.get_tokenizer(name)
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            raise InputError(f"the tokenizer of {name} cannot be loaded ({short(error)}).") from error
