"""Images of masks."""

import numpy as np
import pytest

from vispe.errors import ShapeError
from vispe.evaluate.plots.attention_blocks import plot_blocks
from vispe.multimodal import Parallel, Stream, Text


def test_colours_show_the_visible_member():
    stream = Stream.of([[Text(1), Parallel([Text(1), Text(2)], "all"), Text(1)]], "left", 7)
    actual = np.asarray(plot_blocks(stream).images[0].get_array())
    expected = [[1, 0, 0, 0, 0], [1, 2, 3, 3, 0], [1, 3, 2, 0, 0], [1, 3, 2, 2, 0], [1, 1, 1, 1, 1]]
    assert actual.tolist() == expected
    plain = plot_blocks(Stream.of([[Text(3)]]))
    assert np.asarray(plain.images[0].get_array()).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert [t.get_text() for t in plain.get_legend().get_texts()] == ["attends"]
    with pytest.raises(ShapeError, match="one row"):
        plot_blocks(Stream.of([[Text(1)], [Text(2)]]))
