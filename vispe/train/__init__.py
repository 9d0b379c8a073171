"""Retrofit: removal of positional bias from a pretrained vision transformer by distillation.

The teacher is the unchanged model; the student has the same weights and another positional encoding, and is trained on
the teacher's features without the channels that encode position. `retrofit` runs the training, as does the command
`vispe retrofit`; `load_student` loads the result. Importing this package imports no heavy dependencies.

>>> from vispe.train import Retrofit
>>> from vispe.train.retrofit.config import Stage, Teacher
>>> config = Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224, steps=100)], [{"synthetic": 50}], "out")
>>> config.student.pos_embed
'alibi2d'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vispe.train.retrofit  # noqa: F401 - before the function of the same name, which would be shadowed
from vispe._lazy import lazy_exports, share_namespace

if TYPE_CHECKING:
    from vispe.train.data.dataset import Source
    from vispe.train.retrofit.config import Retrofit
    from vispe.train.retrofit.distillation import DistillationResult
    from vispe.train.retrofit.stage_plan import OnStep, Say

__all__ = ["Retrofit", "load_student", "retrofit"]

_MODULES = {"Retrofit": "vispe.train.retrofit.config", "load_student": "vispe.train.retrofit.student"}
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)


def retrofit(
    config: Retrofit, *, source: Source | None = None, on_step: OnStep | None = None, say: Say | None = None
) -> DistillationResult:
    """Train a student without the teacher's positional bias, and write it to the output folder.

    Args:
        config: models, stages, data and all other settings.
        source: image source that replaces the sources of the config.
        on_step: called after every training step with its number, the total number of steps, and the new line of the
            log, if there is one.
        say: called with status messages outside of the training loop.

    Returns:
        The student, its model card and the verdict.

    Raises:
        OptionError: invalid or contradictory settings.
        InputError: unreadable data, or a folder with a finished run or an interrupted run of other settings.
        UnsupportedHost: the teacher cannot be converted.

    Example:
        >>> import tempfile
        >>> from vispe.train.retrofit.config import Probe, Retrofit, Stage, Teacher
        >>> teacher = Teacher("test_vit", weights="random", img_size=64, options={"depth": 1})
        >>> stages, folder = [Stage(64, steps=1, batch_size=2)], tempfile.mkdtemp()
        >>> probe = Probe(noise=1, textures=1, masks=1, step=2)
        >>> config = Retrofit(teacher, stages, [{"synthetic": 2}], folder, probe=probe, tensorboard=False)
        >>> retrofit(config).student.num_features
        64
    """
    from vispe.train.retrofit.distillation import retrofit as run

    return run(config, source=source, on_step=on_step, say=say)


share_namespace(retrofit, "vispe.train.retrofit")
