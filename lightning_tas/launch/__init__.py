"""What surrounds a training run: the run folder, the study record, loggers, provenance."""
