"""What this machine offers a process: CPU limits, Slurm's variables, device state."""
