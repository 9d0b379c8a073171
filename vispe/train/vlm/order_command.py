"""Command for the order-invariance fine-tuning of a transformers model, from a file of prompts and a recipe.

    python -m vispe.train.vlm --config vlm_order_invariance.yaml --data prompts.jsonl --out out

Each line of the file is a prompt: `{"images": ["a.png", "b.png"], "before": "", "after": "Which ...?", "answer":
"red"}`, with paths relative to the folder of the file. `before`, `after` and `item` of the recipe are raw model inputs,
including the special tokens of the chat template; {image} in `item` is the image placeholder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.distributed import Processes
from vispe.errors import InputError, OptionError, VispeError, require, short
from vispe.images.paths import absolute
from vispe.train.retrofit.recipe_files import recipe_permissions, task_arguments
from vispe.train.vlm.order_invariance import OnStep, OrderRecipe, order_scores, train_order_invariance
from vispe.train.vlm.prompts import Piece, Prompt
from vispe.utils.files import write_json
from vispe.utils.interval import Interval

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
_KEYS = ("images", "before", "after", "answer")


@dataclass(frozen=True, kw_only=True)
class OrderTask(OrderRecipe):
    """Recipe with model and prompts.

    Attributes:
        model: image-text-to-text model of transformers, name or folder.
        data: file of prompts, one line of JSON each.
        out: output folder of the trained model and its model card.
        item: text of an image item, with {image} as placeholder.
        val_every: every n-th prompt is held out for evaluation.
        orders: number of random orders per held-out prompt, before and after.
        device: auto, cpu, cuda, ...
        force: overwrite a finished run.

    Raises:
        OptionError: a number out of range, or an invalid `item`.
    """

    model: str
    data: str
    out: str
    item: str = "{image}\n"
    val_every: Annotated[int, Interval(least=2)] = 5
    orders: Annotated[int, Interval(least=2)] = 6
    device: str = "auto"
    force: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.item.count("{image}") != 1:
            raise OptionError(f"item must contain {{image}} once, got {self.item!r}.")


def order_invariance(task: OrderTask, on_step: OnStep | None = None) -> dict[str, Any]:
    """Train, and evaluate on held-out prompts before and after; return the contents of `card.json`.

    An interrupted run resumes if it is called again; under torchrun, processes share each batch.

    'spread' is the range (maximum minus minimum) over orders of the mean log-probability of the answer tokens, and
    'score' its mean, both averaged over prompts. A model with constant answers has a small spread as well, so compare
    both.

    Raises:
        OptionError: invalid settings.
        InputError: a finished run, missing files, invalid prompts, or a checkpoint of other settings.
        UnsupportedHost: the model lacks one of the layers, or does not return its attention.
        MissingExtra: transformers is not installed.
    """
    require("transformers", "vlm", "order invariance of a vision-language model")
    from transformers import AutoModelForImageTextToText

    card = Path(task.out) / "card.json"
    if card.exists() and not task.force:
        raise InputError(
            f"{task.out} contains a finished run. Set `force` to overwrite it, or another `out`."
        )
    if not Path(task.data).is_file():
        raise InputError(
            f"data must be a file with one prompt per line, got {task.data}, which does not exist."
        )
    processor = load_processor(task.model)
    prompts = read_prompts(processor, Path(task.data), task.item)
    held_out = prompts[task.val_every - 1 :: task.val_every]
    training = [p for k, p in enumerate(prompts) if (k + 1) % task.val_every]
    if not held_out:
        raise InputError(
            f"{task.data} needs at least val_every={task.val_every} prompts, got {len(prompts)}. Add prompts."
        )
    # small weight updates would be lost in half precision
    options = {"dtype": torch.float32} | ({"attn_implementation": "eager"} if task.even else {})
    model = AutoModelForImageTextToText.from_pretrained(task.model, trust_remote_code=False, **options).eval()
    processes, state = Processes.training(task.device), Path(task.out) / "state.pt"
    model.to(processes.torch_device)
    scores_before = _scores(model, held_out, task)
    recipe = OrderRecipe(**{f.name: getattr(task, f.name) for f in fields(OrderRecipe)})
    train_order_invariance(model, training, recipe, on_step, state=state, processes=processes)
    results = {"before": scores_before, "after": _scores(model, held_out, task)}
    values = {**results, "held_out": len(held_out), "learnt_from": len(training)}
    values["task"] = asdict(task) | absolute_paths(task.model, task.data)
    if processes.main:
        model.save_pretrained(task.out)
        processor.save_pretrained(task.out)
        write_json(card, values, force=True)
        state.unlink(missing_ok=True)
    return values


def load_processor(model: str) -> Any:
    """Return the processor of a transformers model, name or folder.

    Raises:
        InputError: there is no processor, or it is neither on this disk nor reachable.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model={model} has no processor that transformers can load: {short(error)}. Pass the name of a model, or "
            "a folder with model and processor."
        ) from error


def absolute_paths(model: str, data: str) -> dict[str, str]:
    """Return the entries `model` and `data` of a card, with absolute paths of folders and files."""
    return {"model": absolute(model) if Path(model).is_dir() else model, "data": absolute(data)}


def read_prompts(processor: Any, path: Path, item: str) -> list[Prompt]:
    """Return the prompts of a file.

    Args:
        processor: processor of transformers, with a tokenizer and an image token.
        path: path of the file.
        item: text of an image item, with {image} as placeholder.

    Raises:
        InputError: an invalid line, or a missing image.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            images = [_image(processor, path.parent / name, item) for name in record["images"]]
            texts = [record.get("before", ""), record.get("after", ""), record["answer"]]
            unknown = sorted(set(record) - set(_KEYS))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(
                f"{path}: line {number} is not a valid prompt ({type(error).__name__}: {error})."
            ) from error
        if unknown:
            raise InputError(
                f"{path}: line {number}: keys must be {', '.join(_KEYS)}, got {', '.join(unknown)}."
            )
        prefix, suffix, answer = (
            processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
        )
        bos, eos = ([k] * (k is not None) for k in _ends(processor.tokenizer))
        prompts.append(Prompt(images, _text([*answer, *eos]), _text([*bos, *prefix]), _text(suffix)))
    return prompts


def _ends(tokenizer: Any) -> tuple[int | None, int | None]:
    return tokenizer.bos_token_id, tokenizer.eos_token_id


def _text(tokens: Sequence[int]) -> Piece:
    return Piece(Tensor(list(tokens)).long())


def _image(processor: Any, path: Path, item: str) -> Piece:
    """Return an image item as encoded by the processor."""
    from PIL import Image

    with Image.open(path) as image:
        text = item.replace("{image}", processor.image_token)
        options = {"return_tensors": "pt", "add_special_tokens": False}
        inputs = dict(processor(text=[text], images=[image.convert("RGB")], **options))
    tokens, _ = inputs.pop("input_ids")[0], inputs.pop("attention_mask", None)
    per_token = {name: inputs.pop(name)[0] for name in _PER_TOKEN if name in inputs}
    return Piece(tokens, inputs, per_token)


def _scores(model: nn.Module, prompts: Sequence[Prompt], task: OrderTask) -> dict[str, float]:
    """Return spread and mean of the scores over random orders, averaged over prompts."""
    generator = np.random.default_rng([task.seed, 19])
    spreads, means = [], []
    for prompt in prompts:
        orders = [generator.permutation(len(prompt.items)).tolist() for _ in range(task.orders)]
        scores = order_scores(model, prompt, orders)
        spreads.append(float(scores.max() - scores.min()))
        means.append(float(scores.mean()))
    return {"spread": float(np.mean(spreads)), "score": float(np.mean(means))}


def read_task(argv: Sequence[str]) -> OrderTask:
    """Return the task of a command line; `--config FILE` reads YAML, which later options override."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m vispe.train.vlm", description="Order invariance of a model.", default_env=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML file, or a recipe of vispe by name; later options override it"
    )
    parser.add_class_arguments(OrderTask, as_group=False)
    values = vars(parser.parse_args(task_arguments(argv, OrderTask)))
    values.pop("config")
    return OrderTask(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default `sys.argv`) and return the exit code."""
    try:
        with recipe_permissions(sys.argv[1:] if argv is None else argv) as rest:
            task = read_task(rest)

            def show(step: int, loss: float) -> None:
                sys.stderr.write(f"\rstep {step} of {task.steps}, loss {loss:.4f}")
                sys.stderr.flush()

            results = order_invariance(task, show)
    except VispeError as error:
        sys.stderr.write(f"vlm: {error}\n")
        return 2
    for when in ("before", "after"):
        sys.stdout.write(
            f"{when}: spread over orders {results[when]['spread']:.3f}, score {results[when]['score']:.3f}\n"
        )
    sys.stderr.write(f"\nwritten: {task.out}\n")
    return 0
