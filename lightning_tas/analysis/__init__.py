"""Pictures and tables of what a run found."""
