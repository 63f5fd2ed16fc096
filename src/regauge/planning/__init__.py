"""Catalog of chips and machine types: power, price and source of each.

Entry points: `catalog.find_price` and `catalog.find_chip`, for the [execution.price] table that
`settings` defines. The data is in `chips.csv` and `instances.csv`. Nothing here imports torch.
"""
