"""Retrofit: take positional bias out of a pretrained vision transformer by distillation.

The teacher is the model as it is; the student has the same weights and another positional encoding, and learns the
teacher's features without the channels that reveal positions. `retrofit` runs it all, and so does the command
`vispe retrofit`; `load_student` reads what it wrote. Importing this package imports nothing heavy.

>>> from vispe.train import Retrofit
>>> from vispe.train.retrofit.config import Stage, Teacher
>>> config = Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224, steps=100)], [{"synthetic": 50}], "out")
>>> config.student.pos_embed
'alibi2d'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vispe.train.retrofit  # noqa: F401 - the folder first: the function of its name is defined after it
from vispe._lazy import face

if TYPE_CHECKING:
    from vispe.train.data.dataset import Source
    from vispe.train.retrofit.config import Retrofit
    from vispe.train.retrofit.distillation import Result, Say
    from vispe.train.retrofit.trainer import OnStep

__all__ = ["Retrofit", "load_student", "retrofit"]

_PLACES = {"Retrofit": "vispe.train.retrofit.config", "load_student": "vispe.train.retrofit.student"}
__getattr__, __dir__ = face(__name__, _PLACES)


def retrofit(
    config: Retrofit, *, source: Source | None = None, on_step: OnStep | None = None, say: Say | None = None
) -> Result:
    """Train a student without the teacher's positional bias, and write it to the folder of the config.

    Args:
        config: the models, the stages, the data and everything else.
        source: pictures, in place of those that the config names.
        on_step: called after every update with its number, the number of all, and the new line of the log, if any.
        say: called with a sentence about what is done beside training.
    """
    from vispe.train.retrofit.distillation import retrofit as run

    return run(config, source=source, on_step=on_step, say=say)
