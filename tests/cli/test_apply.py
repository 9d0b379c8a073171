"""Options of `vispe segment` that `vispe apply` does not have are explained."""

import inspect

from tests.cases import cases
from vispe.cli.commands.segmentation.apply import UNAVAILABLE, apply
from vispe.cli.commands.segmentation.segment import segment
from vispe.cli.main import main


@cases("option", ["features", "classifier", "labels", "token_stride"])
def test_what_the_model_decides_is_said(option, capsys):
    flag = f"--{option.replace('_', '-')}"
    assert main(["apply", "model.vispe", "a.png", "-o", "out", flag, "x"]) == 2
    said = capsys.readouterr().err
    assert f"apply has no option '{flag}': the model decides it." in said
    assert "Did you mean" not in said


def test_the_explained_options_are_those_of_segment_alone():
    own, other = (set(inspect.signature(command).parameters) for command in (apply, segment))
    # `model` is the file here, and not the network
    assert set(UNAVAILABLE) - {"model"} == other - own - {"score_labelled"}
