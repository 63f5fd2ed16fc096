"""Parts of the launcher `aws-batch`. The texts of the documents are in `templates/`.

| file | content |
| --- | --- |
| `settings` | the stack: compute environment, queue, fair share |
| `documents` | the requests RegisterJobDefinition and SubmitJob |
| `container` | the container of a node: devices, volumes, limits, secrets |
| `stack` | the stack, as requests and as a CloudFormation template |
| `jobs` | submit, describe, cancel and clean up |
| `client` | calls of AWS and their errors |
| `rehearsal` | the processes of the requests, with the variables of Batch |
| `status` | the state of a job from DescribeJobs |
| `logs` | log streams of CloudWatch Logs |
"""
