"""Golden cases of the search for channels that correlate with the position."""

from vispe.evaluate.features.position_channels import search

WORDS = ("degree", "skip", "layers_from", "layers_to", "window", "polyorder")


def run(case):
    options = {word: case.config(word) for word in WORDS if word in case.settings}
    codes, rough, agreeing, ranking = search(case.input("hidden").numpy(), **options)
    result = {"monotone": codes, "smoothness": rough, "layers": agreeing, "ranking": ranking}
    yield "search", {name: value for name, value in result.items() if name in case.output_names}
