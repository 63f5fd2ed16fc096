"""Whether a run may start here: devices, collectives, storage and hosts, measured."""
