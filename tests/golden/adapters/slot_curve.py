"""Golden cases of the prior of slots: its index, and calibrated attention."""

from vispe.hosts.slot_calibration import calibrate, psi


def run(case):
    if "scores" in case.inputs:
        yield "psi", {"psi": psi(case.input("scores"), case.config("decimals", None)).reshape(-1)}
    if "attention" in case.inputs:
        inputs = (case.input(name) for name in ("attention", "item", "dummy"))
        result = calibrate(*inputs, case.config("temperature", 5e-5))
        yield "calibrated", {k: v for k, v in vars(result).items() if k in case.output_names}
