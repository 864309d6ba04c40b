"""The command line: config schema, recipes, and one module per command."""
