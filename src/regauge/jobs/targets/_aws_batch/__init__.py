"""Parts of the launcher `aws-batch`.

| file | content |
| --- | --- |
| `settings` | the stack: compute environment, queue, fair share |
| `documents` | the requests RegisterJobDefinition and SubmitJob |
| `container` | the container of a node: devices, volumes, limits, secrets |
| `stack`, `template` | the requests that create the stack; its CloudFormation template |
| `jobs` | submit, describe, cancel and clean up |
| `client` | calls of AWS and their errors |
| `rehearsal` | the processes of the requests, with the variables of Batch |
| `status` | the state of a job from DescribeJobs |
| `logs` | log streams of CloudWatch Logs |
"""
