"""Notifications of runs without Prometheus: a webhook, Slack-compatible JSON, and e-mail.

| File | Content |
| --- | --- |
| `settings` | The table `monitoring.notifications` of a run file |
| `events` | One event with its JSON document and its texts |
| `notifier` | Sends the events of one command to every sink, and combines repeated ones |
| `sinks` | The request of an event for each sink, with its secrets |
| `delivery` | The queue, the retries and the time limits of a sink |
| `send_request` | The process that sends one request |

No step waits for a sink: an event is queued, and a thread of the sink starts a process that sends
it. That process is killed at its time limit. This package imports no torch.
"""
