"""Clusters of EKS and container images, which jobs on Kubernetes and AWS Batch need.

| file | content |
| --- | --- |
| `settings` | the [cluster] and [image] tables |
| `facts` | versions of Kubernetes and support of vendors on EKS, each with its source |
| `cluster_lints` | checks of the settings of a cluster, each with its source |
| `rendering` | the folder of a cluster, its commands and its price |
| `terraform/`, `manifests/` | files that are written unchanged, or with a version |
| `templates/` | eksctl's file, file systems, commands, and the Dockerfile |
| `removal` | the commands that remove a cluster, and the audit of remaining resources |
| `images` | the Dockerfile of an image, its build and its push |

Vendor names and versions are in the data files of this package. Nothing here imports torch.
"""
