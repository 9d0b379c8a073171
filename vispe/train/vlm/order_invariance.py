"""Order invariance of a vision-language model: items shuffled in training, and few weights that even attention.

After PAPEFT (position-aware parameter-efficient fine-tuning), of which the abstract alone was read: shuffled items and
an adapter that evens attention over slots. Which adapter, and how, is ours: low-rank changes of queries and keys, and
a penalty on uneven attention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.distributed import POSITIONS, Processes
from vispe.encodings.positions import set_progress
from vispe.errors import InputError, OptionError, UnsupportedHost
from vispe.files import atomic_path
from vispe.train.data.sampler import Order
from vispe.train.retrofit.lora import add_lora, merge_lora
from vispe.train.vlm.prompts import Arranged, Prompt

OnStep = Callable[[int, float], None]
"""Called with the number of updates made, and the loss of the last."""

_SAVED_EVERY = 20  # updates


@dataclass(frozen=True, kw_only=True)
class OrderRecipe:
    """How a model learns that order does not matter.

    Attributes:
        steps: updates.
        batch: prompts for each update, each in an order of its own.
        rate: learning rate.
        rank: of the low-rank changes.
        layers: linear layers of the language model that get them, by the last part of their names.
        even: weight of the penalty on uneven attention; 0 leaves it out.
        seed: of everything drawn.

    Raises:
        OptionError: a number out of its range.
    """

    steps: int = 300
    batch: int = 8
    rate: float = 1e-4
    rank: int = 8
    layers: Sequence[str] = ("q_proj", "k_proj")
    even: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "batch": 1, "rank": 1, "even": 0, "seed": 0}.items():
            if not getattr(self, name) >= least:
                raise OptionError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if not self.rate > 0:
            raise OptionError(f"rate must be above 0, got {self.rate}.")


def learn_orders(
    model: nn.Module,
    prompts: Sequence[Prompt],
    recipe: OrderRecipe,
    on_step: OnStep | None = None,
    *,
    state: Path | None = None,
    processes: Processes | None = None,
) -> nn.Module:
    """Train a model of transformers in place, with items in another order each time; its weights are plain again after.

    Loss of a prompt: mean cross entropy of the tokens of its answer + even * `unevenness` of the attention with which
    they are said. All that is drawn depends on seed, step and row of the batch, so a run that goes on ends as one that
    was never stopped, and several processes share a batch.

    Args:
        model: for image, text to text; with even > 0 its attention must be 'eager', which gives its weights.
        prompts: with items whose order does not matter.
        recipe: how.
        on_step: called after every update.
        state: file of the state, from which a run goes on; the caller removes it when all is written. None keeps none.
        processes: that train together, each with the same model and prompts; this one alone by default.

    Returns:
        the same model, frozen and in evaluation mode.

    Raises:
        OptionError: no prompts, or one with a single item.
        InputError: the state is of another recipe, or of other prompts.
        UnsupportedHost: it has none of the layers, or does not give its attention.
    """
    if not prompts:
        raise OptionError("Orders are learnt from prompts, got none.")
    if any(len(prompt.items) < 2 for prompt in prompts):
        raise OptionError(
            "An order needs two items or more in every prompt, got a prompt with one; leave it out."
        )
    processes = processes or Processes()
    device = next(model.parameters()).device
    drawn, language = Order([(0, len(prompts), 1)], recipe.seed), model.get_decoder()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        model.requires_grad_(False)
        add_lora(language, recipe.rank, recipe.layers)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.rate, weight_decay=0.0)
        model.train()
        identity = {"recipe": asdict(recipe), "prompts": _digest(prompts)}
        for step in range(_resumed(state, identity, trained, optimizer), recipe.steps):
            for p in trained:
                p.grad = torch.zeros_like(p)
            total = 0.0
            numbers = drawn(step * recipe.batch + np.arange(recipe.batch)).tolist()
            for row in processes.share(recipe.batch):
                prompt = prompts[numbers[row]]
                # of step and row alone, whichever process has it
                torch.manual_seed(Processes(row).seed(recipe.seed, step))
                set_progress(
                    model, step / recipe.steps, seed=Processes(row).seed(recipe.seed, step, POSITIONS)
                )
                order = np.random.default_rng([recipe.seed, 17, step, row]).permutation(len(prompt.items))
                loss = _loss(model, prompt.arranged(order, device), recipe.even) / recipe.batch
                loss.backward()
                total += float(loss.detach())
            processes.sum_([p.grad for p in trained if p.grad is not None])
            optimizer.step()
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
    """Write the state, whole or not at all."""
    values = {"identity": identity, "step": step, "weights": [p.detach() for p in trained]}
    with atomic_path(state, force=True) as part:
        torch.save(values | {"optimizer": optimizer.state_dict()}, part)


def _resumed(
    state: Path | None,
    identity: dict[str, Any],
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> int:
    """Take up the state, if there is one; return how many updates were made."""
    if state is None or not state.is_file():
        return 0
    kept = torch.load(state, weights_only=True, map_location="cpu")
    if kept["identity"] != identity:
        raise InputError(f"{state} is of another recipe, or of other prompts; remove it to begin anew.")
    with torch.no_grad():
        for p, value in zip(trained, kept["weights"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(kept["optimizer"])
    return int(kept["step"])


def _digest(prompts: Sequence[Prompt]) -> str:
    """Return a fingerprint of the tokens of prompts."""
    pieces = (p.tokens for one in prompts for p in (*one.items, one.answer, one.before, one.after) if p)
    return hashlib.sha256(b"|".join(t.cpu().numpy().tobytes() for t in pieces)).hexdigest()


def unevenness(attentions: Sequence[Tensor], arranged: Arranged) -> Tensor:
    """Return the variance over items of the mean attention to a token of each, in units of its mean over items.

    >>> row = torch.tensor([0.3, 0.1, 0.6]).expand(1, 1, 3, 3)
    >>> float(unevenness([row], Arranged({}, (slice(0, 1), slice(1, 2)), slice(2, 3))))
    0.25

    Args:
        attentions: of each layer, (1, h, n, n); the mean over layers, heads and tokens that are asking is taken.
        arranged: where items and answer are.
    """
    rows = torch.stack([a[0, :, arranged.asking].float().mean((0, 1)) for a in attentions]).mean(0)
    items = torch.stack([rows[item].mean() for item in arranged.items])
    return (items / items.mean() - 1).square().mean()


@torch.no_grad()
def order_scores(model: nn.Module, prompt: Prompt, orders: Iterable[Sequence[int]]) -> Tensor:
    """Return the log-probability of a token of the answer, mean over its tokens, for each order (k,).

    The largest less the smallest is what the order alone decides.
    """
    device = next(model.parameters()).device
    return torch.stack([-_answered(model, prompt.arranged(order, device))[0].cpu() for order in orders])


def _loss(model: nn.Module, arranged: Arranged, even: float) -> Tensor:
    if not even:
        return _answered(model, arranged)[0]
    loss, output = _answered(model, arranged, output_attentions=True)
    attentions = output.attentions or (None,)
    if any(one is None for one in attentions):
        raise UnsupportedHost(
            f"even={even} needs the attention of {type(model).__name__}, which gives none; call "
            "model.set_attn_implementation('eager'), or set even to 0."
        )
    return loss + even * unevenness(attentions, arranged)


def _answered(model: nn.Module, arranged: Arranged, **options: Any) -> tuple[Tensor, Any]:
    """Return the mean cross entropy of the answer, and the output of the model."""
    output = model(**arranged.inputs, **options, use_cache=False)
    return F.cross_entropy(output.logits[0, arranged.asking].float(), arranged.wanted), output
