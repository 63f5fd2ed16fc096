"""EKS clusters and container images, for jobs on Kubernetes and AWS Batch.

| file | content |
| --- | --- |
| `settings` | the [cluster] and [image] tables |
| `facts` | Kubernetes versions and vendor support on EKS, each with a source |
| `cluster_lints` | cluster settings checks, each with a source |
| `rendering` | cluster folder, commands and price |
| `terraform/`, `manifests/` | files written unchanged, or with a version |
| `templates/` | eksctl file, file systems, commands, and the Dockerfile |
| `removal` | commands that remove a cluster, and the audit for remaining resources |
| `image_lints` | image checks |
| `pins` | package versions for an image |
| `images` | render, build and push a Dockerfile |

Vendor names and versions are in this package's data files. Nothing here imports torch.
"""
