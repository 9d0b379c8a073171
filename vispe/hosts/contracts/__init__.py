"""Names of other libraries that vispe relies on without a promise of these libraries, and their check."""
