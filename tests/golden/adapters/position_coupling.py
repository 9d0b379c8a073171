"""Golden cases of coupled positions: digits of a sum, and the cells of a board."""

from vispe.multimodal.streams.position_coupling import addition_positions, board_positions


def run(case):
    case.ignore("max_position", "the starts are given")
    start = case.input("start").tolist()
    if case.config("task") == "grid":
        result = board_positions(case.config("width"), case.config("height"), start)
    else:
        result = addition_positions(
            *(case.config(f"digits_{n}") for n in ("a", "b", "sum")),
            start[0],
            reverse_input=case.config("reverse_input", False),
            reverse_output=case.config("reverse_output", False),
        )
    yield "ids", dict(zip(("input_positions", "answer_positions"), result, strict=True))
