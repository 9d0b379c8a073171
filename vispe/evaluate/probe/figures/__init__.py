"""Pictures and the page of the probe."""
