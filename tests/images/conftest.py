"""Random forests with few trees in the tests of images."""

from tests.segment.few_trees import _all_trees_in_long_tests, _few_trees, default_trees  # noqa: F401
