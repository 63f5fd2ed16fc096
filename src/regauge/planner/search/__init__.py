"""The search for machines and options that `regauge plan` answers with."""
