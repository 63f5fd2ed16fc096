"""Optimizers and their defaults, for `training/optimizer.py` and `training/resolve.py`.

`optimizer_defaults.py` resolves settings whose defaults depend on the initial weights, and imports
no torch. `lamb.py` is the optimizer missing in torch.
"""
