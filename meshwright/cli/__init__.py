"""The command line: one file a verb. Imports what a verb needs when it runs, so that `--help` is quick."""
