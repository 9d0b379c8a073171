"""The public names of `vispe.train`; that they are imported lazily is tested in tests/test_import.py."""


def test_the_function_is_that_of_the_recipe(tmp_path):
    from tests.train.tiny import RandomImages, config
    from vispe.train import load_student, retrofit

    steps = []
    result = retrofit(
        config(tmp_path), source=RandomImages(), on_step=lambda step, total, line: steps.append(step)
    )
    assert steps == list(range(1, 8))
    student, _, card = load_student(tmp_path)
    assert card == result.card
    assert student.channels == 24
