"""Experiments: measures, recipes and building blocks without a stability promise.

Names, options and results may change or be removed in any version. Everything here is tested like the rest of the
package, and reproduces its papers where these have code, but no encoding, host or measurement of vispe depends on it.
`import vispe` does not import it. The list, with papers, is in `docs/reference/experimental.md`.
"""
