"""Order-invariance fine-tuning of a vision-language model with shuffled items and a low-rank adapter.

After the abstract of PAPEFT (position-aware parameter-efficient fine-tuning): shuffled items and an adapter that
equalises attention over items. The form of the adapter is ours: low-rank updates of queries and keys, and a
penalty on unequal attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.distributed import POSITIONS, Processes
from vispe.encodings.positions import set_progress
from vispe.errors import InputError, OptionError, UnsupportedHost
from vispe.train.data.sampler import Order
from vispe.train.loop import TrainingStep
from vispe.train.retrofit.lora import add_lora, merge_lora
from vispe.train.vlm.prompts import OrderedPrompt, Prompt
from vispe.utils.digest import tensor_digest
from vispe.utils.files import atomic_path
from vispe.utils.options import NonNegativeFloat, Options, PositiveFloat, PositiveInt, Seed

OnStep = Callable[[int, float], None]
"""Called with the number of training steps done, and the loss of the last one."""

_SAVED_EVERY = 20  # training steps between two checkpoints


@dataclass(frozen=True, kw_only=True)
class OrderRecipe(Options):
    """Settings of the order-invariance fine-tuning.

    Attributes:
        steps: number of training steps.
        batch_size: prompts per step, each in its own random order.
        lr: learning rate.
        rank: rank of the low-rank updates.
        target_modules: linear layers of the language model with updates, by the last component of their names.
        even: weight of the penalty on unequal attention; 0 disables it.
        seed: seed of all random numbers.

    Raises:
        OptionError: a number out of range.
    """

    steps: PositiveInt = 300
    batch_size: PositiveInt = 8
    lr: PositiveFloat = 1e-4
    rank: PositiveInt = 8
    target_modules: Sequence[str] = ("q_proj", "k_proj")
    even: NonNegativeFloat = 0.1
    seed: Seed = 0


def train_order_invariance(
    model: nn.Module,
    prompts: Sequence[Prompt],
    recipe: OrderRecipe,
    on_step: OnStep | None = None,
    *,
    state: Path | None = None,
    processes: Processes | None = None,
) -> nn.Module:
    """Train a transformers model in place with shuffled items; the adapter is merged afterwards.

    Loss of a prompt: mean cross entropy of its answer tokens + even * `attention_inequality` of the attention at these
    tokens. All random numbers depend on seed, step and row of the batch, so resumed runs are identical and several
    processes can share a batch.

    Args:
        model: image-text-to-text model; with even > 0 the attention implementation must be 'eager'.
        prompts: prompts whose items have no inherent order.
        recipe: training settings.
        on_step: called after every training step.
        state: checkpoint file from which a run resumes; the caller deletes it at the end. None disables checkpoints.
        processes: processes of the training, each with the same model and prompts; default a single process.

    Returns:
        The same model, frozen and in evaluation mode.

    Raises:
        OptionError: no prompts, or a prompt with a single item.
        InputError: the checkpoint belongs to other settings or prompts.
        UnsupportedHost: the model lacks one of the layers, or does not return its attention.
    """
    if not prompts:
        raise OptionError("train_order_invariance: needs prompts, got none.")
    if any(len(prompt.items) < 2 for prompt in prompts):
        raise OptionError(
            "train_order_invariance: prompts must have two or more items, got a prompt with one. Remove it."
        )
    processes = processes or Processes()
    device = next(model.parameters()).device
    prompt_order, language = Order([(0, len(prompts), 1)], recipe.seed), model.get_decoder()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        model.requires_grad_(False)
        add_lora(language, recipe.rank, recipe.target_modules)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=0.0)
        model.train()
        settings = asdict(recipe)
        settings["layers"] = settings.pop("target_modules")  # key of the checkpoint
        identity = {"recipe": settings, "prompts": _digest(prompts)}
        training_step = TrainingStep(optimizer, processes=processes)

        def backward(step: int) -> float:
            """Add the gradients of the prompts of this process; return the sum of their losses."""
            # zeros instead of None: processes without a prompt take part in the sum
            for p in trained:
                p.grad = torch.zeros_like(p)
            total = 0.0
            numbers = prompt_order(step * recipe.batch_size + np.arange(recipe.batch_size)).tolist()
            for row in processes.share(recipe.batch_size):
                prompt = prompts[numbers[row]]
                # depends on step and row only, regardless of the process
                torch.manual_seed(Processes(row).seed(recipe.seed, step))
                set_progress(
                    model, step / recipe.steps, seed=Processes(row).seed(recipe.seed, step, POSITIONS)
                )
                order = np.random.default_rng([recipe.seed, 17, step, row]).permutation(len(prompt.items))
                # divided by the global batch, so that the sum over rows and processes is the mean
                loss = _loss(model, prompt.arranged(order, device), recipe.even) / recipe.batch_size
                loss.backward()
                total += float(loss.detach())
            return total

        for step in range(_resumed(state, identity, trained, optimizer), recipe.steps):
            total = training_step(partial(backward, step))
            if state is not None and processes.main and (step + 1) % _SAVED_EVERY == 0:
                _save(state, identity, step + 1, trained, optimizer)
            if on_step is not None:
                on_step(step + 1, processes.total(total))
    set_progress(model, 1.0)
    merge_lora(language)
    return model.eval().requires_grad_(False)


def _save(
    state: Path,
    identity: dict[str, Any],
    step: int,
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    values = {"identity": identity, "step": step, "weights": [p.detach() for p in trained]}
    with atomic_path(state, force=True) as part:
        torch.save(values | {"optimizer": optimizer.state_dict()}, part)


def _resumed(
    state: Path | None,
    identity: dict[str, Any],
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> int:
    """Load the checkpoint, if there is one; return the number of training steps done.

    Raises:
        InputError: the checkpoint belongs to other settings or prompts.
    """
    if state is None or not state.is_file():
        return 0
    stored = torch.load(state, weights_only=True, map_location="cpu")
    if stored["identity"] != identity:
        raise InputError(f"{state} belongs to another recipe or other prompts. Remove it to restart.")
    with torch.no_grad():
        for p, value in zip(trained, stored["weights"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(stored["optimizer"])
    return int(stored["step"])


def _digest(prompts: Sequence[Prompt]) -> str:
    """Return a sha256 of the tokens and pixels of prompts."""
    pieces = [p for one in prompts for p in (*one.items, one.answer, one.before, one.after) if p]
    return tensor_digest(t for p in pieces for t in (p.tokens, *p.inputs.values(), *p.per_token.values()))


def attention_inequality(attentions: Sequence[Tensor], arranged: OrderedPrompt) -> Tensor:
    """Return the variance over items of the mean attention per token of an item, relative to the squared mean.

    >>> row = torch.tensor([0.3, 0.1, 0.6]).expand(1, 1, 3, 3)
    >>> float(attention_inequality([row], OrderedPrompt({}, (slice(0, 1), slice(1, 2)), slice(2, 3))))
    0.25

    Args:
        attentions: attention weights of each layer, (1, h, n, n), averaged over layers, heads and the tokens that
            predict the answer.
        arranged: prompt with the token ranges of items and answer.
    """
    # (h, answer, n) -> (n,) in each layer, mean over layers
    rows = torch.stack([a[0, :, arranged.asking].float().mean((0, 1)) for a in attentions]).mean(0)
    # mean per token, so that large images have no advantage
    items = torch.stack([rows[item].mean() for item in arranged.items])
    return (items / items.mean() - 1).square().mean()


@torch.no_grad()
def order_scores(model: nn.Module, prompt: Prompt, orders: Iterable[Sequence[int]]) -> Tensor:
    """Return the mean log-probability of the answer tokens for each order, (k,).

    The range (maximum minus minimum) measures the effect of the order.
    """
    device = next(model.parameters()).device
    return torch.stack([-_answer_loss(model, prompt.arranged(order, device))[0].cpu() for order in orders])


def _loss(model: nn.Module, arranged: OrderedPrompt, even: float) -> Tensor:
    if not even:
        return _answer_loss(model, arranged)[0]
    loss, output = _answer_loss(model, arranged, output_attentions=True)
    attentions = output.attentions or (None,)
    if any(one is None for one in attentions):
        raise UnsupportedHost(
            f"even={even} needs the attention weights of {type(model).__name__}, got none. Call "
            "model.set_attn_implementation('eager'), or set `even` to 0."
        )
    return loss + even * attention_inequality(attentions, arranged)


def _answer_loss(model: nn.Module, arranged: OrderedPrompt, **options: Any) -> tuple[Tensor, Any]:
    """Return the mean cross entropy of the answer tokens, and the output of the model."""
    output = model(**arranged.inputs, **options, use_cache=False)
    return F.cross_entropy(output.logits[0, arranged.asking].float(), arranged.wanted), output
