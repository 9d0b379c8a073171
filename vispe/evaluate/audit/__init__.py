"""All measures in one pass, with controls and intervals, on one page."""
