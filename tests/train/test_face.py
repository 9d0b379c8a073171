"""The names that `vispe.train` hands on, whatever was imported before, at no cost."""

import subprocess
import sys

PROGRAM = """
import sys
import vispe.train
assert not {name for name in sys.modules if name.startswith(("vispe.train.data", "vispe.train.retrofit."))}
import vispe.train.retrofit.config
from vispe.train import Retrofit, retrofit
assert Retrofit is vispe.train.Retrofit is sys.modules["vispe.train.retrofit.config"].Retrofit
assert callable(retrofit) and retrofit is vispe.train.retrofit
"""


def test_names_are_handed_on_and_load_when_asked_for():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_function_is_that_of_the_recipe(tmp_path):
    from tests.train.tiny import Pictures, config
    from vispe.train import load_student, retrofit

    steps = []
    result = retrofit(
        config(tmp_path), source=Pictures(), on_step=lambda step, total, line: steps.append(step)
    )
    assert steps == list(range(1, 8))
    student, _, card = load_student(tmp_path)
    assert card == result.card
    assert student.channels == 24
