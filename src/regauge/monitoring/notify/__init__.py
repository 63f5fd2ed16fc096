"""Run notifications without Prometheus: a webhook, Slack-compatible JSON, and e-mail.

Entry point: `notifier.open_notifier`. Steps never wait for a sink: an event is queued, and a sink
thread starts a process that sends it. That process is killed at its time limit. This package does
not import torch.
"""
