"""Recipes: one YAML file per experiment, its first line a comment that says what it does; installed as `lightning_tas.recipes`."""
