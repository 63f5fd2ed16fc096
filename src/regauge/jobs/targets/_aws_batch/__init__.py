"""Parts of the launcher `aws-batch`. The document texts are in `templates/`.

| file | content |
| --- | --- |
| `settings` | the stack: compute environment, queue, fair share |
| `documents` | the requests RegisterJobDefinition and SubmitJob, and their processes |
| `container` | a node's container: devices, volumes, limits, secrets |
| `stack` | the stack, as requests and as a CloudFormation template |
| `jobs` | submit, describe, cancel and clean up; CloudWatch Logs streams |
| `status` | job state from DescribeJobs |
"""
