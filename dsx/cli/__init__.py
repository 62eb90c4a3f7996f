"""The `dsx` command: one file per subcommand, argument parsing only."""
