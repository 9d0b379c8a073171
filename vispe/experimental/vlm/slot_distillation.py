"""Slot distillation: self-distillation for answers that do not depend on the slot (index) of the relevant item.

Source: Pos2Distill (github.com/AMAP-ML/Pos2Distill, kd/loss_design.py, commit ffa9715). The teacher is the frozen model
with the relevant item at a good slot; the student has it at other slots. Slots with a larger divergence have a larger
weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.backbones.distributed import Processes
from vispe.errors import ShapeError, counted
from vispe.utils.options import NonNegativeFloat, PositiveFloat, checked


@dataclass(frozen=True)
class SlotLoss:
    """Loss of a batch with its components.

    Attributes:
        loss: scalar of this process; losses and gradients must be summed over processes.
        kl: divergence of each sample of this process, (b,).
        weights: weights of these samples, (b,), without gradient.
    """

    loss: Tensor
    kl: Tensor
    weights: Tensor


@checked
def slot_distillation(
    student: Tensor,
    teacher: Tensor,
    slots: Tensor,
    *,
    student_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    anchor_weight: NonNegativeFloat = 1.0,
    temperature: PositiveFloat = 1.0,
    processes: Processes | None = None,
) -> SlotLoss:
    """Return the sum over samples of weight * KL(teacher || student) * temperature^2.

    Weights are computed over the batch of all processes (see `slot_weights`). With wrappers that average gradients over
    processes, such as DistributedDataParallel, multiply the loss by the number of processes.

    Args:
        student: logits (b, l, v) with the item at `slots`.
        teacher: logits (b, l', v) with the item at the good slot.
        slots: slot of the item, (b,) integers; 0 is the good slot.
        student_mask: logits of the answer, (b, l) bool; default all.
        teacher_mask: logits of the answer of the teacher, (b, l') bool, with equal counts per sample.
        anchor_weight: weight of samples at the good slot, which regularise the model.
        temperature: divisor of the logits.
        processes: processes of the training; default a single process.

    Raises:
        ShapeError: shapes that do not match, or answers of different lengths or without tokens.
        OptionError: `temperature` is not above 0, or `anchor_weight` is below 0.

    >>> result = slot_distillation(torch.zeros(1, 1, 2), torch.tensor([[[9.0, -9.0]]]), torch.tensor([2]))
    >>> round(float(result.loss), 4)
    0.6931
    """
    kl = divergence(student, teacher, student_mask, teacher_mask, temperature)
    if slots.shape != kl.shape or slots.is_floating_point():
        raise ShapeError(
            f"slots must be {counted(len(kl), 'integer')}, one per sample, got {tuple(slots.shape)} {slots.dtype}."
        )
    processes = processes or Processes()
    parts = processes.joined((kl.detach().cpu(), slots.cpu()))
    all_weights = slot_weights(*map(torch.cat, zip(*parts, strict=True)), anchor_weight)
    local_weights = all_weights.split([len(part) for part, _ in parts])[processes.rank].to(kl)
    return SlotLoss((local_weights * kl).sum() * temperature**2, kl, local_weights)


def slot_weights(kl: Tensor, slots: Tensor, anchor_weight: float = 1.0) -> Tensor:
    """Return the weight of each sample of a global batch, (b,), without gradient.

    Samples at slot 0 have `anchor_weight`. Each of the n other slots in the batch has the weight n * softmax over slots
    of its mean divergence, which is divided equally among its samples and multiplied by their divergence relative to
    the largest of the slot.

    >>> slot_weights(torch.tensor([3.0, 1.0, 1.0, 0.5]), torch.tensor([0, 2, 1, 1]))
    tensor([1.0000, 1.1244, 0.4378, 0.2189])

    Args:
        kl: divergences (b,).
        slots: (b,) integers.
        anchor_weight: weight of samples at slot 0.
    """
    # rounding can make the divergence of equal answers slightly negative
    kl = kl.detach().clamp(min=0)
    numbers = slots[slots != 0].unique()
    if not len(numbers):
        return torch.full_like(kl, anchor_weight)
    members = slots == numbers[:, None]
    kl_by_slot, counts = members * kl, members.sum(1)
    # slots with the largest divergence have the largest weight; the mean weight is 1
    slot_weight = len(numbers) * (kl_by_slot.sum(1) / counts).softmax(0)
    # within a slot, proportional to the divergence; clamped for slots without divergence
    largest = kl_by_slot.amax(1).clamp(min=torch.finfo(kl.dtype).tiny)
    weights = ((slot_weight / counts)[:, None] * (kl_by_slot / largest[:, None])).sum(0)
    return weights.masked_fill(slots == 0, anchor_weight)


def divergence(
    student: Tensor,
    teacher: Tensor,
    student_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return KL(teacher || student) of each sample, mean over the answer tokens, (b,) float32.

    Args:
        student: logits (b, l, v).
        teacher: logits (b, l', v), without gradient.
        student_mask: logits of the answer, (b, l) bool; default all.
        teacher_mask: logits of the answer of the teacher, (b, l') bool.
        temperature: divisor of the logits.

    Raises:
        ShapeError: shapes that do not match, or answers of different lengths or without tokens.
    """
    masks = [_mask(*pair) for pair in ((student, student_mask), (teacher, teacher_mask))]
    counts, teacher_counts = (mask.sum(1) for mask in masks)
    if (
        student.shape[::2] != teacher.shape[::2]
        or not torch.equal(counts, teacher_counts)
        or not counts.all()
    ):
        raise ShapeError(
            f"divergence: answers must have equal lengths of one or more tokens, got logits {tuple(student.shape)} and "
            f"{tuple(teacher.shape)} with {counts.tolist()} and {teacher_counts.tolist()} tokens."
        )
    # both have equal token counts per sample, so row k of one corresponds to row k of the other
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
        got = "none" if mask is None else f"{tuple(mask.shape)} {mask.dtype}"
        raise ShapeError(
            f"divergence: needs logits (b, l, v) and a mask (b, l) of bool, got {tuple(logits.shape)} and {got}."
        )
    return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if mask is None else mask
