"""The machinery of a training run: loop, optimizer, precision, scoring, ledger."""
