"""The command line: `dreamer <command>`, one small file a command; parsing and printing only."""
