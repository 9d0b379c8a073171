"""Fine-tuning to another scheme: few weights (LoRA) learn to read pictures whose positions have changed.

Source of LoRA: Hu et al., arXiv 2106.09685, as peft has it. The loop is that of transformers' Trainer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vispe.errors import InputError, OptionError, UnsupportedHost, require
from vispe.files import write_json
from vispe.hosts.convert import convert
from vispe.hosts.transformers.language.convert import inner_of
from vispe.hosts.transformers.language.families import text_of
from vispe.hosts.transformers.packed_samples import check_layers
from vispe.multimodal import create_scheme
from vispe.train.vlm.packing import IGNORED, Packing
from vispe.train.vlm.prompts import Arranged

SCHEME = "scheme.json"  # beside the adapter: its own files do not say what the model was converted to


@dataclass(frozen=True, kw_only=True)
class LoraRecipe:
    """How a model learns another scheme.

    Attributes:
        scheme: that the model is to have, with options.
        steps: updates.
        batch: samples for each update.
        length: tokens of a row, into which as many samples are packed as fit.
        rate: learning rate.
        rank: of the low-rank changes.
        layers: linear layers of the language model that get them, by the last part of their names.
        save_every: updates between checkpoints, from which a run goes on.
        seed: of everything drawn.

    Raises:
        OptionError: a number out of its range.
        UnknownName: there is no such scheme.
    """

    scheme: str = "mrope_i"
    steps: int = 1000
    batch: int = 8
    length: int = 4096
    rate: float = 1e-4
    rank: int = 16
    layers: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        create_scheme(self.scheme)
        for name in ("steps", "batch", "length", "rank", "save_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.rate > 0 or self.seed < 0:
            raise OptionError(
                f"rate must be above 0 and seed 0 or more, got rate={self.rate} and seed={self.seed}."
            )


def learn_scheme(
    model: nn.Module, samples: Sequence[Arranged], recipe: LoraRecipe, out: Path, *, device: str = "auto"
) -> nn.Module:
    """Convert a stock model of transformers, train an adapter for it, and write that with its scheme to a folder.

    Loss: mean cross entropy of the tokens of answers of a batch. A run that was stopped goes on from its last
    checkpoint, and ends as one that was not; under torchrun each process has its own batch.

    Args:
        model: for image, text to text; changed in place.
        samples: to learn from.
        recipe: how.
        out: folder for adapter, `scheme.json` and checkpoints.
        device: auto or cpu.

    Returns:
        the model with its adapter, in evaluation mode.

    Raises:
        OptionError: no samples.
        InputError: a sample is longer than a row, or `out` holds a run of another recipe.
        UnsupportedHost: the model takes no scheme, cannot isolate packed samples, or has none of the layers.
        MissingExtra: peft or accelerate is not installed.
    """
    if not samples:
        raise OptionError("A scheme is learnt from samples, got none.")
    if device not in ("auto", "cpu"):
        raise OptionError(f"device is 'auto', which the Trainer chooses, or 'cpu', got {device!r}.")
    for package in ("transformers", "peft", "accelerate"):
        require(package, "vlm,train", "fine-tuning to another scheme")
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    before = _resumed(out, recipe)
    check_layers(text_of(inner_of(model)), "learn_scheme")
    convert(model, recipe.scheme)
    packing = Packing(model, recipe.length, training=True, seed=recipe.seed)
    packing.rows([s.inputs["input_ids"].shape[1] for s in samples])  # so that what is too long is said now
    names = _names(model, recipe.layers)
    torch.manual_seed(recipe.seed)
    tuned = get_peft_model(model, LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=names))
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=recipe.steps, per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.rate, lr_scheduler_type="constant", save_steps=recipe.save_every, save_total_limit=2,
        logging_steps=10, seed=recipe.seed, report_to=[], remove_unused_columns=False, label_names=["labels"],
        use_cpu=device == "cpu", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    if arguments.n_gpu > 1:
        raise OptionError(
            f"There are {arguments.n_gpu} GPUs for one process, which would cut packed rows apart; start one process "
            "for each with torchrun, or show one with CUDA_VISIBLE_DEVICES."
        )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SCHEME, _identity(recipe), force=True)
    trainer = Trainer(tuned, arguments, data_collator=packing, train_dataset=list(samples))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # that the scheme is missing beside an adapter: here it is written
        warnings.filterwarnings("ignore", "An adapter is saved without its base model")
        trainer.train(resume_from_checkpoint=before)
        trainer.save_model(str(out))
    return tuned.eval()


def load_adapter(model: nn.Module, folder: Path | str) -> nn.Module:
    """Give a stock model the scheme and the adapter of a folder that `learn_scheme` wrote; returns it with both.

    `merge_and_unload()` of what is returned gives a converted model, which `save_pretrained` writes with its scheme.

    Raises:
        InputError: the folder has no scheme, or no adapter.
    """
    require("peft", "vlm,train", "an adapter")
    from peft import PeftModel

    path = Path(folder)
    if not (path / SCHEME).is_file() or not (path / "adapter_config.json").is_file():
        raise InputError(f"{path} needs {SCHEME} and an adapter; give the folder that the recipe wrote.")
    convert(model, json.loads((path / SCHEME).read_text(encoding="utf-8"))["scheme"])
    return PeftModel.from_pretrained(model, str(path)).eval()  # type: ignore[arg-type]


@torch.no_grad()
def accuracy(model: Any, samples: Sequence[Arranged], *, length: int = 1024, batch: int = 64) -> float:
    """Return the share of samples of which every token of the answer is the likeliest one.

    Args:
        model: converted, with or without an adapter, in evaluation mode.
        samples: that are asked.
        length: tokens of a row; that of the longest sample if it is longer.
        batch: samples of a call.

    Raises:
        OptionError: no samples, or the model is not converted.
    """
    if not samples:
        raise OptionError("Accuracy is measured on samples, got none.")
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    longest = max(s.inputs["input_ids"].shape[1] for s in samples)
    packing, place = Packing(whole, max(length, longest)), next(model.parameters()).device
    right = 0
    for first in range(0, len(samples), batch):
        inputs = {k: v.to(place) for k, v in packing(samples[first : first + batch]).items()}
        labels, keys = inputs.pop("labels"), inputs["position_ids"][0]
        said = model(**inputs, use_cache=False).logits[:, :-1].argmax(-1)
        asked = labels[:, 1:] != IGNORED
        # samples start at key 0; one is right when none of its tokens is wrong
        number = (keys == 0).flatten().cumsum(0).view_as(keys)[:, 1:][asked]
        wrong = number[said[asked] != labels[:, 1:][asked]]
        right += len(number.unique()) - len(wrong.unique())
    return right / len(samples)


def _names(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the full names of linear layers of the language model, so that those of the vision tower stay."""
    text = text_of(inner_of(model))
    inside = {id(m) for m in text.modules()}
    found = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and id(m) in inside and name.split(".")[-1] in layers
    ]
    missing = sorted(set(layers) - {name.split(".")[-1] for name in found})
    if missing:
        raise UnsupportedHost(
            f"The language model of {type(model).__name__} has no linear layers called {', '.join(missing)}."
        )
    return found


def _identity(recipe: LoraRecipe) -> dict[str, Any]:
    """Return what a run must share with the one that it goes on from."""
    values = asdict(recipe) | {"layers": list(recipe.layers)}
    return {name: value for name, value in values.items() if name not in ("steps", "save_every")}


def _resumed(out: Path, recipe: LoraRecipe) -> str | None:
    """Return the last checkpoint of a folder, if it has one."""
    from transformers.trainer_utils import get_last_checkpoint

    found = get_last_checkpoint(str(out)) if out.is_dir() else None
    if found is None:
        return None
    kept = json.loads((out / SCHEME).read_text(encoding="utf-8")) if (out / SCHEME).is_file() else {}
    if kept != _identity(recipe):
        other = sorted(k for k, v in _identity(recipe).items() if kept.get(k) != v)
        raise InputError(
            f"{out} holds a run of another recipe ({', '.join(other)}); choose another folder, or remove it."
        )
    return found
