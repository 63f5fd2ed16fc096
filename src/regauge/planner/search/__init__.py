"""The search for machines and options behind `regauge plan`."""
