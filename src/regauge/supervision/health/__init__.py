"""Health checks: whether a run may start on these devices, hosts and storage.

Each check yields a `findings.Finding`. There are three entry points:

- `machine.check_machine`: storage, without torch
- `preflight.run_preflight`: a run's processes check themselves before they allocate
- `examination.examine`: `regauge doctor` checks all devices in processes that it kills if they hang

`device` and `collectives` hold the checks that use torch. `probe` is the worker process of an
examination, and `vendors` runs the vendor's own tools and reads its counters. The
package may import `accelerators`, `checkpoint.remote` and files below them.
"""
