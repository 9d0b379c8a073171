"""What every host does: words of a spec, fitting, context, cache, loading."""
