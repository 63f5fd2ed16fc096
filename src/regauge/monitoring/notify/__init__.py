"""Run notifications without Prometheus: a webhook, Slack-compatible JSON, and e-mail.

| File | Content |
| --- | --- |
| `settings` | The `monitoring.notifications` table |
| `events` | One event with its JSON document and texts |
| `notifier` | Sends one command's events to every sink, and combines repeated ones |
| `sinks` | Each sink's request for an event, with secrets |
| `delivery` | A sink's queue, retries and time limits |
| `send_request` | The process that sends one request |

Steps never wait for a sink: an event is queued, and a sink thread starts a process that sends it.
That process is killed at its time limit. This package does not import torch.
"""
