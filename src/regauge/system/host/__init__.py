"""What the machine of a process offers: CPU limits, Slurm's variables, the state of its devices."""
