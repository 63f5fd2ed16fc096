"""Parts of the launcher `kubernetes`: documents of each kind, kubectl, and the state of a job.

| file | content |
| --- | --- |
| `settings` | the fields of the target |
| `documents` | the job of each API, from `templates/` |
| `pods` | the pod template and the metadata that all kinds share |
| `volumes` | volumes, claims, and the run file as a ConfigMap |
| `kubectl` | commands of kubectl and their errors |
| `job_client` | state, events, logs, cancellation and cleanup of a job |
| `job_status`, `job_set_status` | conditions and pods as the state of a job, or of a pipeline |
| `operators` | the pods that the operators create, for a rehearsal |
"""
