"""Golden cases of slot distillation: divergence of each sample, and the loss with its gradient."""

from vispe.experimental.vlm.slot_distillation import slot_distillation


def run(case):
    student = case.input("student").requires_grad_()
    masks = {name: case.input(name) for name in ("student_mask", "teacher_mask") if name in case.inputs}
    result = slot_distillation(
        student,
        case.input("teacher"),
        case.input("slot"),
        **masks,
        anchor_weight=case.config("anchor_weight", 1.0),
        temperature=case.config("temperature", 1.0),
    )
    result.loss.backward()
    yield "loss", {"kl": result.kl, "loss": result.loss[None], "grad.student": student.grad}
