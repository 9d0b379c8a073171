"""Golden cases of slot distillation: divergence of each sample, and the loss with its gradient."""

from vispe.experimental.vlm.slot_distillation import slot_distillation


def run(case):
    student = case.input("student").requires_grad_()
    masks = {name: case.input(name) for name in ("student_mask", "teacher_mask") if name in case.inputs}
    found = slot_distillation(
        student,
        case.input("teacher"),
        case.input("slot"),
        **masks,
        anchor_weight=case.config("anchor_weight", 1.0),
        temperature=case.config("temperature", 1.0),
    )
    found.loss.backward()
    yield "loss", {"kl": found.kl, "loss": found.loss[None], "grad.student": student.grad}
