"""The `vispe` command: one file per subcommand, no logic."""
