"""Lightning callbacks that connect search strategies to training; installed as `lightning_tas.callbacks`."""
