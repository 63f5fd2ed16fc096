"""Clusters and container images: what a job needs before it can be submitted.

| file | content |
| --- | --- |
| `settings` | the [cluster] and [image] tables |
| `facts` | versions of Kubernetes, components and base images, each with its source |
| `eksctl`, `terraform` | the documents of a cluster |
| `manifests` | device plugins, operator, etcd and file systems |
| `cluster_lints` | checks of the settings of a cluster, each with its source |
| `rendering` | the folder of a cluster, its commands and its price |
| `removal` | the commands that remove a cluster, and the audit of what is left |
| `images` | the Dockerfile of an image, its build and its push |

Vendor names and versions are in the data files of this package. Nothing here imports torch.
"""
