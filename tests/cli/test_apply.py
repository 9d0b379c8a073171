"""`vispe apply` explains why it lacks options of `vispe segment`."""

import inspect

from tests.cases import cases
from vispe.cli.commands.segmentation.apply import UNAVAILABLE, apply
from vispe.cli.commands.segmentation.segment import segment
from vispe.cli.main import main


@cases("option", ["features", "classifier", "labels", "token_stride"])
def test_options_fixed_by_the_model_raise_an_explanation(option, capsys):
    flag = f"--{option.replace('_', '-')}"
    assert main(["apply", "model.vispe", "a.png", "-o", "out", flag, "x"]) == 2
    err = capsys.readouterr().err
    assert f"apply has no option '{flag}': the model decides it." in err
    assert "Did you mean" not in err


def test_unavailable_options_are_those_of_segment_only():
    apply_options, segment_options = (
        set(inspect.signature(command).parameters) for command in (apply, segment)
    )
    # `model` of apply is the model file, not the backbone
    assert set(UNAVAILABLE) - {"model"} == segment_options - apply_options - {"score_labelled"}
