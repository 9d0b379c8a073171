"""Subcommands of `vispe`, one file each."""
