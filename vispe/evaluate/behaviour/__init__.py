"""Measures that run the model again on changed inputs."""
