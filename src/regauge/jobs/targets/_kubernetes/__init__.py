"""Parts of the launcher `kubernetes`: documents for each kind, kubectl, and job state.

| file | content |
| --- | --- |
| `settings` | target settings |
| `documents` | each API's job, from `templates/` |
| `pods` | the pod template and metadata shared by all kinds |
| `volumes` | volumes, claims, and the run file as a ConfigMap |
| `kubectl` | kubectl commands and their errors |
| `job_client` | a job's state, events, logs, cancellation and cleanup |
| `job_status` | conditions and pods -> job or pipeline state |
| `operators` | the pods that operators create, for a rehearsal |
"""
