"""Fine-tuning of a vision-language model to another position scheme with LoRA.

Source of LoRA: Hu et al., arXiv 2106.09685, as implemented in peft. The training loop is the Trainer of transformers.
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
from vispe.hosts.convert import convert
from vispe.hosts.transformers.language.families import FAMILIES, language_model_of, model_inside
from vispe.hosts.transformers.packed_samples import check_layers
from vispe.multimodal import create_scheme
from vispe.train.vlm.packing import IGNORED, Packing
from vispe.train.vlm.prompts import OrderedPrompt
from vispe.utils.digest import tensor_digest
from vispe.utils.files import write_json
from vispe.utils.options import Options, PositiveFloat, PositiveInt, Seed

SCHEME = "scheme.json"  # file stored with the adapter, as the adapter's own files do not contain the scheme


@dataclass(frozen=True, kw_only=True)
class LoraRecipe(Options):
    """Settings of the fine-tuning to another scheme.

    Attributes:
        scheme: position scheme, with options.
        steps: number of training steps.
        batch_size: samples per step and process.
        max_length: tokens per row, into which several samples are packed.
        lr: learning rate.
        rank: rank of the low-rank updates.
        target_modules: linear layers of the language model with updates, by the last component of their names.
        save_steps: training steps between two checkpoints.
        seed: seed of all random numbers.

    Raises:
        OptionError: a number out of range.
        UnknownName: unknown scheme.
    """

    scheme: str = "mrope_i"
    steps: PositiveInt = 1000
    batch_size: PositiveInt = 8
    max_length: PositiveInt = 4096
    lr: PositiveFloat = 1e-4
    rank: PositiveInt = 16
    target_modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    save_steps: PositiveInt = 100
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        create_scheme(self.scheme)


def finetune_scheme(
    model: nn.Module, samples: Sequence[OrderedPrompt], recipe: LoraRecipe, out: Path, *, device: str = "auto"
) -> nn.Module:
    """Convert a transformers model to a scheme, train an adapter, and write adapter and scheme to a folder.

    Loss: mean cross entropy of the answer tokens of a batch. An interrupted run resumes from its last checkpoint with
    identical results; under torchrun each process has its own batch.

    Args:
        model: image-text-to-text model; modified in place.
        samples: training samples.
        recipe: training settings.
        out: output folder of adapter, `scheme.json` and checkpoints.
        device: 'auto' or 'cpu'.

    Returns:
        The model with its adapter, in evaluation mode.

    Raises:
        OptionError: no samples, an unknown device, or several GPUs in one process.
        InputError: a sample is longer than a row, or `out` contains a run with other settings or samples.
        UnsupportedHost: the model supports no scheme, cannot isolate packed samples, or lacks one of the layers.
        MissingExtra: peft or accelerate is not installed.
    """
    if not samples:
        raise OptionError("finetune_scheme: needs samples, got none.")
    if device not in ("auto", "cpu"):
        raise OptionError(
            f"finetune_scheme: device must be 'auto' (selected by the Trainer) or 'cpu', got {device!r}."
        )
    for package in ("transformers", "peft", "accelerate"):
        require(package, "vlm,train", "fine-tuning to another scheme")
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    identity = _identity(recipe) | {
        "samples": tensor_digest(value for sample in samples for value in sample.inputs.values())
    }
    last_checkpoint = _resumed(out, identity)
    inner = model_inside(model)
    family = FAMILIES.get(getattr(inner.config, "model_type", ""))
    check_layers(language_model_of(inner), "finetune_scheme", family is not None and family.prefix_lm)
    convert(model, recipe.scheme)
    packing = Packing(model, recipe.max_length, training=True, seed=recipe.seed)
    packing.rows([s.inputs["input_ids"].shape[1] for s in samples])  # raises for samples that are too long
    names = _names(model, recipe.target_modules)
    torch.manual_seed(recipe.seed)
    tuned = get_peft_model(model, LoraConfig(r=recipe.rank, lora_alpha=recipe.rank, target_modules=names))
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=recipe.steps, per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.lr, lr_scheduler_type="constant", save_steps=recipe.save_steps, save_total_limit=2,
        logging_steps=10, seed=recipe.seed, report_to=[], remove_unused_columns=False, label_names=["labels"],
        use_cpu=device == "cpu", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    if arguments.n_gpu > 1:
        raise OptionError(
            f"finetune_scheme: packed rows cannot be split over GPUs, got {arguments.n_gpu} GPUs in one process. Start "
            "one process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES."
        )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SCHEME, identity, force=True)
    trainer = Trainer(tuned, arguments, data_collator=packing, train_dataset=list(samples))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # the warning about a missing scheme does not apply: it was written above
        warnings.filterwarnings("ignore", "An adapter is saved without its base model")
        trainer.train(resume_from_checkpoint=last_checkpoint)
        trainer.save_model(str(out))
    return tuned.eval()


def load_adapter(model: nn.Module, folder: Path | str) -> nn.Module:
    """Convert a model to the scheme of an output folder of `finetune_scheme`, and load its adapter.

    `merge_and_unload()` of the result returns a converted model, which `save_pretrained` saves with its scheme.

    Raises:
        InputError: the folder has no scheme or no adapter.
        MissingExtra: peft is not installed.
    """
    require("peft", "vlm,train", "an adapter")
    from peft import PeftModel

    path = Path(folder)
    if not (path / SCHEME).is_file() or not (path / "adapter_config.json").is_file():
        raise InputError(f"{path} needs {SCHEME} and an adapter. Pass the output folder of the fine-tuning.")
    convert(model, json.loads((path / SCHEME).read_text(encoding="utf-8"))["scheme"])
    return PeftModel.from_pretrained(model, str(path)).eval()  # type: ignore[arg-type]


@torch.no_grad()
def accuracy(
    model: Any, samples: Sequence[OrderedPrompt], *, max_length: int = 1024, batch_size: int = 64
) -> float:
    """Return the fraction of samples whose answer is predicted exactly (greedy, every token correct).

    Args:
        model: converted model, with or without an adapter, in evaluation mode.
        samples: samples to evaluate.
        max_length: tokens per row; the length of the longest sample if that is larger.
        batch_size: samples per forward pass.

    Raises:
        OptionError: no samples, or the model is not converted.
    """
    if not samples:
        raise OptionError("accuracy: needs samples, got none.")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    longest = max(s.inputs["input_ids"].shape[1] for s in samples)
    packing, device = Packing(base, max(max_length, longest)), next(model.parameters()).device
    correct = 0
    for first in range(0, len(samples), batch_size):
        inputs = {k: v.to(device) for k, v in packing(samples[first : first + batch_size]).items()}
        labels, keys = inputs.pop("labels"), inputs["position_ids"][0]
        predicted = model(**inputs, use_cache=False).logits[:, :-1].argmax(-1)
        is_answer = labels[:, 1:] != IGNORED
        # token index 0 starts a new sample; a sample is correct if none of its answer tokens is wrong
        number = (keys == 0).flatten().cumsum(0).view_as(keys)[:, 1:][is_answer]
        wrong = number[predicted[is_answer] != labels[:, 1:][is_answer]]
        correct += len(number.unique()) - len(wrong.unique())
    return correct / len(samples)


def _names(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the full names of linear layers of the language model, without those of the vision tower."""
    text = language_model_of(model_inside(model))
    inside = {id(m) for m in text.modules()}
    names = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and id(m) in inside and name.split(".")[-1] in layers
    ]
    missing = sorted(set(layers) - {name.split(".")[-1] for name in names})
    if missing:
        raise UnsupportedHost(
            f"The language model of {type(model).__name__} has no linear layers called {', '.join(missing)}."
        )
    return names


def _identity(recipe: LoraRecipe) -> dict[str, Any]:
    """Return the settings that must not change when a run resumes."""
    values: dict[str, Any] = asdict(recipe)
    # keys of the file
    values |= {"length": values.pop("max_length"), "layers": list(values.pop("target_modules"))}
    return {name: value for name, value in values.items() if name not in ("steps", "save_steps")}


def _resumed(out: Path, identity: dict[str, Any]) -> str | None:
    """Return the last checkpoint of a folder, or None.

    Raises:
        InputError: the checkpoint belongs to other settings or samples.
    """
    from transformers.trainer_utils import get_last_checkpoint

    checkpoint = get_last_checkpoint(str(out)) if out.is_dir() else None
    if checkpoint is None:
        return None
    stored = json.loads((out / SCHEME).read_text(encoding="utf-8")) if (out / SCHEME).is_file() else {}
    if stored != identity:
        changed = sorted(k for k, v in identity.items() if stored.get(k) != v)
        raise InputError(
            f"{out} contains a run of another recipe ({', '.join(changed)}). Set another `out`, or remove it."
        )
    return checkpoint
