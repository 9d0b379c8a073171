"""A model of transformers and another scheme, from a file of prompts and a recipe.

    python -m vispe.train.vlm.lora_command --config vlm_lora_scheme.yaml --data prompts.jsonl --out out

The file of prompts is that of `vispe.train.vlm.order_command`; one picture in a prompt is enough.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from vispe.errors import InputError, OptionError, VispeError, require
from vispe.files import write_json
from vispe.train.retrofit.recipe_files import as_permitted, with_recipes
from vispe.train.vlm.lora import LoraRecipe, accuracy, learn_scheme
from vispe.train.vlm.order_command import read_prompts


@dataclass(frozen=True, kw_only=True)
class LoraTask(LoraRecipe):
    """A recipe with its model and prompts.

    Attributes:
        model: of transformers, for image, text to text: name or folder.
        data: file of prompts, a line of JSON each.
        out: folder for adapter, scheme and card.
        item: how a picture is written; {image} stands for it.
        held_every: every n-th prompt is not trained on but measured.
        device: auto or cpu.
    """

    model: str
    data: str
    out: str
    item: str = "{image}\n"
    held_every: int = 5
    device: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_every < 2 or self.item.count("{image}") != 1:
            raise OptionError(
                f"held_every must be at least 2 and item hold {{image}} once, got {self.held_every} and {self.item!r}."
            )


def fine_tune(task: LoraTask) -> dict[str, Any]:
    """Convert, train, and measure right answers on prompts that were held out; returns what `card.json` says.

    A run that was stopped goes on when it is called again. 'before' is the converted model that has not been trained.

    Raises:
        OptionError, InputError, UnsupportedHost, MissingExtra: the task cannot be carried out.
    """
    require("transformers", "vlm", "fine-tuning to another scheme")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    card = Path(task.out) / "card.json"
    if card.exists():
        raise InputError(f"{task.out} holds a finished run; choose another out, or remove it.")
    if not Path(task.data).is_file():
        raise InputError(f"data={task.data} is not a file; give one with a prompt in each line.")
    processor = AutoProcessor.from_pretrained(task.model, trust_remote_code=False)
    prompts = [p.arranged(range(len(p.items))) for p in read_prompts(processor, Path(task.data), task.item)]
    held = prompts[task.held_every - 1 :: task.held_every]
    learnt = [p for k, p in enumerate(prompts) if (k + 1) % task.held_every]
    if not held:
        raise InputError(
            f"{task.data} has {len(prompts)} prompts, of which every {task.held_every}th is held out; give more."
        )
    model = AutoModelForImageTextToText.from_pretrained(
        task.model, dtype=torch.float32, trust_remote_code=False
    )
    recipe = LoraRecipe(**{f.name: getattr(task, f.name) for f in fields(LoraRecipe)})
    tuned: Any = learn_scheme(model, learnt, recipe, Path(task.out), device=task.device)
    after = accuracy(tuned, held, length=task.length, batch=task.batch)
    with tuned.disable_adapter():
        before = accuracy(tuned, held, length=task.length, batch=task.batch)
    found = {"before": before, "after": after, "held_out": len(held), "learnt_from": len(learnt)}
    found["task"] = asdict(task)
    processor.save_pretrained(task.out)
    write_json(card, found)
    return found


def read_task(argv: Sequence[str]) -> LoraTask:
    """Return the task of a command line; `--config FILE` reads YAML, options after it win."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m vispe.train.vlm.lora_command",
        description="A model learns another scheme.",
        default_env=False,
    )
    parser.add_argument(
        "--config", action="config", help="YAML file, or a recipe of vispe by name; options after it win"
    )
    parser.add_argument("--json", action="store_true", help="write the card to standard output")
    parser.add_class_arguments(LoraTask, as_group=False)
    values = vars(parser.parse_args(with_recipes(argv)))
    values.pop("config"), values.pop("json")
    return LoraTask(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        with as_permitted(words) as rest:
            found = fine_tune(read_task(rest))
    except VispeError as error:
        sys.stderr.write(f"vlm: {error}\n")
        return 2
    if "--json" in words:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(
            f"right answers of {found['held_out']} held out: {found['before']:.3f} before, {found['after']:.3f} after\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
