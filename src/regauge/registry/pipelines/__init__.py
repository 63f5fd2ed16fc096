"""Pipelines that repeat on growing data: rounds, increments, the gate and the deadline.

A round is one pass through the stages on fixed inputs. This package does not run verbs.
"""
