"""How weights are trained: LightningModules for supernets and single networks, the recipe's parts, checkpoints.

Nothing is imported here, so that `lightning_tas.training.config` costs no torch; import from the modules.
"""
