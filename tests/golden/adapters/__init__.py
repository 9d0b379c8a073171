"""One adapter per encoding: it names parameters and calls vispe's public classes; it has no maths of the method.

An adapter is a module named like the case's `meta["encoding"]` with a function `run(case)` that yields
(route, outputs) pairs. A route is one way to compute the case (a backend, a converted block); its outputs are
named like the `out.*` arrays. Every input, parameter and configuration key has to be read.
"""
