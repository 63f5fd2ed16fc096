"""Parts of the launcher `kubernetes`: documents of each kind, kubectl, and the state of a job.

| file | content |
| --- | --- |
| `settings` | the fields of the target |
| `devices` | resource names of accelerators, from `devices.csv` |
| `pods` | the pod template that all kinds share |
| `volumes` | volumes, claims, and the run file as a ConfigMap |
| `batch_job`, `pytorch_job`, `train_job` | the documents of the three kinds |
| `kubectl` | commands of kubectl and their errors |
| `job_client` | state, events, logs, cancellation and cleanup of a job |
| `job_status` | conditions and pods as the state of a job |
| `operators` | the pods that the operators create, for a rehearsal |
"""
