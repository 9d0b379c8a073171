"""Golden cases of LongEmbed: ids of longer inputs."""

from tests.golden.adapters._longer import longer


def run(case):
    yield "places", longer(case)
