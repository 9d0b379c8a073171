"""Order invariance of a model of transformers, from a file of prompts and a recipe.

    python -m vispe.train.vlm --config vlm_order_invariance.yaml --data prompts.jsonl --out out

A line of the file is a prompt: `{"images": ["a.png", "b.png"], "before": "", "after": "Which ...?", "answer": "red"}`,
with paths from the folder of the file on. `before` and `after` are written as the model reads them, with the marks of
its chat template, and so is `item` of the recipe, where {image} stands for a picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.distributed import Processes
from vispe.errors import InputError, OptionError, VispeError, require
from vispe.files import write_json
from vispe.train.retrofit.recipe_files import as_permitted, with_recipes
from vispe.train.vlm.order_invariance import OnStep, OrderRecipe, learn_orders, order_scores
from vispe.train.vlm.prompts import Piece, Prompt

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
_KEYS = ("images", "before", "after", "answer")


@dataclass(frozen=True, kw_only=True)
class OrderTask(OrderRecipe):
    """A recipe with its model and prompts.

    Attributes:
        model: of transformers, for image, text to text: name or folder.
        data: file of prompts, a line of JSON each.
        out: folder for the trained model and its card.
        item: how a picture is written; {image} stands for it.
        held_every: every n-th prompt is not trained on but measured.
        orders: in which each of these is asked, before and after.
        device: auto, cpu, cuda, ...
        force: replace a finished run.
    """

    model: str
    data: str
    out: str
    item: str = "{image}\n"
    held_every: int = 5
    orders: int = 6
    device: str = "auto"
    force: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_every < 2 or self.orders < 2:
            raise OptionError(
                f"held_every and orders must be at least 2, got {self.held_every} and {self.orders}."
            )
        if self.item.count("{image}") != 1:
            raise OptionError(f"item={self.item!r} must hold {{image}} once.")


def order_invariance(task: OrderTask, on_step: OnStep | None = None) -> dict[str, Any]:
    """Train, and measure before and after on prompts that were held out; returns what `card.json` says.

    A run that was stopped goes on when it is called again; under torchrun, processes share each batch.

    'spread' is the largest less the smallest log-probability of a token of the answer over orders, and 'score' its
    mean, both means over prompts. A model that answers everything alike has a small spread as well: look at both.

    Raises:
        OptionError, InputError, UnsupportedHost, MissingExtra: the task cannot be carried out.
    """
    require("transformers", "vlm", "order invariance of a vision-language model")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    card = Path(task.out) / "card.json"
    if card.exists() and not task.force:
        raise InputError(
            f"{task.out} holds a finished run; add --force true to replace it, or choose another out."
        )
    if not Path(task.data).is_file():
        raise InputError(f"data={task.data} is not a file; give one with a prompt in each line.")
    try:
        processor = AutoProcessor.from_pretrained(task.model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"model={task.model} has no processor that transformers can load: {reason}"
        ) from error
    prompts = read_prompts(processor, Path(task.data), task.item)
    held = prompts[task.held_every - 1 :: task.held_every]
    learnt = [p for k, p in enumerate(prompts) if (k + 1) % task.held_every]
    if not held:
        raise InputError(
            f"{task.data} has {len(prompts)} prompts, of which every {task.held_every}th is held out; give more."
        )
    # small changes of weights would be lost in half precision
    how = {"dtype": torch.float32} | ({"attn_implementation": "eager"} if task.even else {})
    model = AutoModelForImageTextToText.from_pretrained(task.model, trust_remote_code=False, **how).eval()
    processes, state = Processes.training(task.device), Path(task.out) / "state.pt"
    model.to(processes.place)
    before = _measured(model, held, task)
    recipe = OrderRecipe(**{f.name: getattr(task, f.name) for f in fields(OrderRecipe)})
    learn_orders(model, learnt, recipe, on_step, state=state, processes=processes)
    found = {"before": before, "after": _measured(model, held, task)}
    values = {**found, "held_out": len(held), "learnt_from": len(learnt), "task": asdict(task)}
    if processes.main:
        model.save_pretrained(task.out)
        processor.save_pretrained(task.out)
        write_json(card, values, force=True)
        state.unlink(missing_ok=True)
    return values


def read_prompts(processor: Any, path: Path, item: str) -> list[Prompt]:
    """Return the prompts of a file.

    Args:
        processor: of transformers, with a tokenizer and a token for pictures.
        path: of the file.
        item: how a picture is written; {image} stands for it.

    Raises:
        InputError: a line that is no prompt, or a picture that is not there.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            given = json.loads(line)
            images = [_image(processor, path.parent / name, item) for name in given["images"]]
            texts = [given.get("before", ""), given.get("after", ""), given["answer"]]
            unknown = sorted(set(given) - set(_KEYS))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(
                f"Line {number} of {path} is no prompt ({type(error).__name__}: {error})."
            ) from error
        if unknown:
            raise InputError(
                f"Line {number} of {path} has {', '.join(unknown)}; a prompt has {', '.join(_KEYS)}."
            )
        before, after, answer = (
            processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
        )
        first, last = ([k] * (k is not None) for k in _ends(processor.tokenizer))
        found.append(Prompt(images, _text([*answer, *last]), _text([*first, *before]), _text(after)))
    return found


def _ends(tokenizer: Any) -> tuple[int | None, int | None]:
    return tokenizer.bos_token_id, tokenizer.eos_token_id


def _text(tokens: Sequence[int]) -> Piece:
    return Piece(Tensor(list(tokens)).long())


def _image(processor: Any, path: Path, item: str) -> Piece:
    """Return a picture as the processor writes it."""
    from PIL import Image

    with Image.open(path) as image:
        words = item.replace("{image}", processor.image_token)
        options = {"return_tensors": "pt", "add_special_tokens": False}
        given = dict(processor(text=[words], images=[image.convert("RGB")], **options))
    tokens, _ = given.pop("input_ids")[0], given.pop("attention_mask", None)
    per_token = {name: given.pop(name)[0] for name in _PER_TOKEN if name in given}
    return Piece(tokens, given, per_token)


def _measured(model: nn.Module, prompts: Sequence[Prompt], task: OrderTask) -> dict[str, float]:
    """Return spread and mean of the scores over orders that depend on the seed alone, means over prompts."""
    generator = np.random.default_rng([task.seed, 19])
    spreads, means = [], []
    for prompt in prompts:
        orders = [generator.permutation(len(prompt.items)).tolist() for _ in range(task.orders)]
        scores = order_scores(model, prompt, orders)
        spreads.append(float(scores.max() - scores.min()))
        means.append(float(scores.mean()))
    return {"spread": float(np.mean(spreads)), "score": float(np.mean(means))}


def read_task(argv: Sequence[str]) -> OrderTask:
    """Return the task of a command line; `--config FILE` reads YAML, options after it win."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m vispe.train.vlm", description="Order invariance of a model.", default_env=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML file, or a recipe of vispe by name; options after it win"
    )
    parser.add_class_arguments(OrderTask, as_group=False)
    values = vars(parser.parse_args(with_recipes(argv)))
    values.pop("config")
    return OrderTask(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process, and return the exit code."""
    try:
        with as_permitted(sys.argv[1:] if argv is None else argv) as rest:
            task = read_task(rest)

            def show(step: int, loss: float) -> None:
                sys.stderr.write(f"\rupdate {step} of {task.steps}, loss {loss:.4f}")
                sys.stderr.flush()

            found = order_invariance(task, show)
    except VispeError as error:
        sys.stderr.write(f"vlm: {error}\n")
        return 2
    for when in ("before", "after"):
        sys.stdout.write(
            f"{when}: spread over orders {found[when]['spread']:.3f}, score {found[when]['score']:.3f}\n"
        )
    sys.stderr.write(f"\nwritten: {task.out}\n")
    return 0
