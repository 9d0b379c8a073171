"""Command for fine-tuning a transformers model to another scheme, from a file of prompts and a recipe.

    python -m vispe.train.vlm.lora_command --config vlm_lora_scheme.yaml --data prompts.jsonl --out out

The format of the prompts is described in `vispe.train.vlm.order_command`; prompts with a single image are allowed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch

from vispe.errors import InputError, OptionError, VispeError, counted, require
from vispe.train.retrofit.recipe_files import recipe_permissions, task_arguments
from vispe.train.vlm.lora import LoraRecipe, accuracy, finetune_scheme
from vispe.train.vlm.order_command import absolute_paths, load_processor, read_prompts
from vispe.utils.files import write_json
from vispe.utils.interval import Interval


@dataclass(frozen=True, kw_only=True)
class LoraTask(LoraRecipe):
    """Recipe with model and prompts.

    Attributes:
        model: image-text-to-text model of transformers, name or folder.
        data: file of prompts, one line of JSON each.
        out: output folder of adapter, scheme and model card.
        item: text of an image item, with {image} as placeholder.
        val_every: every n-th prompt is held out for evaluation.
        device: auto or cpu.

    Raises:
        OptionError: a number out of range, or an invalid `item`.
        UnknownName: unknown scheme.
    """

    model: str
    data: str
    out: str
    item: str = "{image}\n"
    val_every: Annotated[int, Interval(least=2)] = 5
    device: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.item.count("{image}") != 1:
            raise OptionError(f"item must contain {{image}} once, got {self.item!r}.")


def fine_tune(task: LoraTask) -> dict[str, Any]:
    """Convert, train, and evaluate on held-out prompts; return the contents of `card.json`.

    An interrupted run resumes if it is called again. 'before' is the accuracy of the converted model before training.

    Raises:
        OptionError: no training samples.
        InputError: a finished run, missing files, or invalid prompts.
        UnsupportedHost: the model supports no scheme, cannot isolate packed samples, or lacks one of the layers.
        MissingExtra: a library is not installed.
    """
    require("transformers", "vlm", "fine-tuning to another scheme")
    from transformers import AutoModelForImageTextToText

    card = Path(task.out) / "card.json"
    if card.exists():
        raise InputError(f"{task.out} contains a finished run. Set another `out`, or remove it.")
    if not Path(task.data).is_file():
        raise InputError(
            f"data must be a file with one prompt per line, got {task.data}, which does not exist."
        )
    processor = load_processor(task.model)
    prompts = [p.arranged(range(len(p.items))) for p in read_prompts(processor, Path(task.data), task.item)]
    held_out = prompts[task.val_every - 1 :: task.val_every]
    training = [p for k, p in enumerate(prompts) if (k + 1) % task.val_every]
    if not held_out:
        raise InputError(
            f"{task.data} needs at least val_every={task.val_every} prompts, got {len(prompts)}. Add prompts."
        )
    model = AutoModelForImageTextToText.from_pretrained(
        task.model, dtype=torch.float32, trust_remote_code=False
    )
    recipe = LoraRecipe(**{f.name: getattr(task, f.name) for f in fields(LoraRecipe)})
    tuned: Any = finetune_scheme(model, training, recipe, Path(task.out), device=task.device)
    after = accuracy(tuned, held_out, max_length=task.max_length, batch_size=task.batch_size)
    with tuned.disable_adapter():
        before = accuracy(tuned, held_out, max_length=task.max_length, batch_size=task.batch_size)
    results = {"before": before, "after": after, "held_out": len(held_out), "learnt_from": len(training)}
    results["task"] = asdict(task) | absolute_paths(task.model, task.data)
    processor.save_pretrained(task.out)
    write_json(card, results)
    return results


def read_task(argv: Sequence[str]) -> LoraTask:
    """Return the task of a command line; `--config FILE` reads YAML, which later options override."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m vispe.train.vlm.lora_command",
        description="Fine-tuning of a model to another position scheme.",
        default_env=False,
    )
    parser.add_argument(
        "--config", action="config", help="YAML file, or a recipe of vispe by name; later options override it"
    )
    parser.add_argument("--json", action="store_true", help="write the card to standard output")
    parser.add_class_arguments(LoraTask, as_group=False)
    values = vars(parser.parse_args(task_arguments(argv, LoraTask)))
    values.pop("config"), values.pop("json")
    return LoraTask(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default `sys.argv`) and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        with recipe_permissions(words) as rest:
            results = fine_tune(read_task(rest))
    except VispeError as error:
        sys.stderr.write(f"vlm: {error}\n")
        return 2
    if "--json" in words:
        sys.stdout.write(json.dumps(results) + "\n")
    else:
        sys.stdout.write(
            f"accuracy on {counted(results['held_out'], 'held-out prompt')}: {results['before']:.3f} before, "
            f"{results['after']:.3f} after\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
