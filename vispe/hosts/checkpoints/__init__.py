"""Released weights, with the names of vispe."""
