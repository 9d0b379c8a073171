"""Slot distillation: a model teaches itself to answer alike wherever the telling item stands among the others.

Source: Pos2Distill (github.com/AMAP-ML/Pos2Distill, kd/loss_design.py, commit ffa9715). The frozen model, with that
item at a slot where it answers well, is the teacher; the student sees it at other slots. Slots at which the two differ
most weigh most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.backbones.distributed import Processes
from vispe.errors import OptionError, ShapeError


@dataclass(frozen=True)
class SlotLoss:
    """The loss of a batch, and what it is made of.

    Attributes:
        loss: scalar: this process's share, such that shares, and their gradients, add up over the processes.
        kl: divergence of each sample of this process, (b,).
        weights: of these samples, (b,), without gradient.
    """

    loss: Tensor
    kl: Tensor
    weights: Tensor


def slot_distillation(
    student: Tensor,
    teacher: Tensor,
    slots: Tensor,
    *,
    student_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    anchor_weight: float = 1.0,
    temperature: float = 1.0,
    processes: Processes | None = None,
) -> SlotLoss:
    """Return the sum over samples of weight * KL(teacher || student) * temperature^2.

    Weights follow from the batch of all processes (see `slot_weights`). A wrapper that averages gradients over
    processes, as DistributedDataParallel does, needs the loss times their number.

    Args:
        student: logits (b, l, v) with the item at `slots`.
        teacher: logits (b, l', v) with it at the good slot.
        slots: where the item stands, (b,) whole numbers; 0 is the good slot.
        student_mask: which logits are of the answer, (b, l) bool; all by default.
        teacher_mask: the same of the teacher, (b, l') bool, as many for each sample.
        anchor_weight: of samples at the good slot, which hold the model where it is.
        temperature: that logits are divided by.
        processes: that train together; this one alone by default.

    Raises:
        ShapeError: shapes that do not fit, or answers of different lengths, or without a token.
        OptionError: a temperature not above 0, or a weight below 0.

    >>> found = slot_distillation(torch.zeros(1, 1, 2), torch.tensor([[[9.0, -9.0]]]), torch.tensor([2]))
    >>> round(float(found.loss), 4)
    0.6931
    """
    if not temperature > 0 or not anchor_weight >= 0:
        raise OptionError(
            f"temperature must be above 0 and anchor_weight 0 or more, got temperature={temperature} and "
            f"anchor_weight={anchor_weight}."
        )
    kl = divergence(student, teacher, student_mask, teacher_mask, temperature)
    if slots.shape != kl.shape or slots.is_floating_point():
        raise ShapeError(
            f"slots must be {len(kl)} whole numbers, one for each sample, got {tuple(slots.shape)} {slots.dtype}."
        )
    processes = processes or Processes()
    parts = processes.joined((kl.detach().cpu(), slots.cpu()))
    whole = slot_weights(*map(torch.cat, zip(*parts, strict=True)), anchor_weight)
    own = whole.split([len(part) for part, _ in parts])[processes.rank].to(kl)
    return SlotLoss((own * kl).sum() * temperature**2, kl, own)


def slot_weights(kl: Tensor, slots: Tensor, anchor_weight: float = 1.0) -> Tensor:
    """Return the weight of each sample of a whole batch, (b,), without gradient.

    A sample at slot 0 has `anchor_weight`. Of the others, n slots occur: each has n * softmax over slots of its mean
    divergence; its samples share that alike, times their divergence over the largest of their slot.

    >>> slot_weights(torch.tensor([3.0, 1.0, 1.0, 0.5]), torch.tensor([0, 2, 1, 1]))
    tensor([1.0000, 1.1244, 0.4378, 0.2189])

    Args:
        kl: divergences (b,).
        slots: (b,) whole numbers.
        anchor_weight: of samples at slot 0.
    """
    # rounding may leave what is answered alike a hair below 0
    kl = kl.detach().clamp(min=0)
    numbers = slots[slots != 0].unique()
    if not len(numbers):
        return torch.full_like(kl, anchor_weight)
    members = slots == numbers[:, None]
    own, counts = members * kl, members.sum(1)
    # slots that are answered worst weigh most, and all of them 1 on average
    share = len(numbers) * (own.sum(1) / counts).softmax(0)
    # within a slot, samples that are answered worst; a slot that is answered as by the teacher has nothing to weigh
    largest = own.amax(1).clamp(min=torch.finfo(kl.dtype).tiny)
    weights = ((share / counts)[:, None] * (own / largest[:, None])).sum(0)
    return weights.masked_fill(slots == 0, anchor_weight)


def divergence(
    student: Tensor,
    teacher: Tensor,
    student_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return KL(teacher || student) of each sample, mean over the tokens of its answer, (b,) float32.

    Args:
        student: logits (b, l, v).
        teacher: logits (b, l', v), which get no gradient.
        student_mask: which of them are of the answer, (b, l) bool; all by default.
        teacher_mask: the same, (b, l') bool.
        temperature: that logits are divided by.

    Raises:
        ShapeError: shapes that do not fit, or answers of different lengths, or without a token.
    """
    masks = [_mask(*pair) for pair in ((student, student_mask), (teacher, teacher_mask))]
    counts, wanted = (mask.sum(1) for mask in masks)
    if student.shape[::2] != teacher.shape[::2] or not torch.equal(counts, wanted) or not counts.all():
        raise ShapeError(
            f"Answers are compared token by token, got logits {tuple(student.shape)} and {tuple(teacher.shape)} with "
            f"{counts.tolist()} and {wanted.tolist()} tokens; give both the same answers, of one token or more."
        )
    # as many tokens of each sample on both sides, in order: row k of one belongs to row k of the other
    logs, of_teacher = (
        (logits[mask].float() / temperature).log_softmax(-1)
        for logits, mask in zip((student, teacher.detach()), masks, strict=True)
    )
    tokens = F.kl_div(logs, of_teacher.exp(), reduction="none").sum(-1)
    samples = torch.arange(len(counts), device=tokens.device).repeat_interleave(counts)
    return tokens.new_zeros(len(counts)).index_add(0, samples, tokens) / counts


def _mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    if logits.ndim != 3 or (
        mask is not None and (mask.shape != logits.shape[:2] or mask.dtype != torch.bool)
    ):
        had = "none" if mask is None else f"{tuple(mask.shape)} {mask.dtype}"
        raise ShapeError(
            f"Slot distillation needs logits (b, l, v) and a mask (b, l) of bool, got {tuple(logits.shape)} and {had}."
        )
    return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if mask is None else mask
