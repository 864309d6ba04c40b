"""Recipes: YAML files, the first line of each a comment that says what it does; here `lightning_tas.recipes`."""
