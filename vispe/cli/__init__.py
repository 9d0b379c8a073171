"""Command line interface of vispe: one file per subcommand, which only calls the library."""
