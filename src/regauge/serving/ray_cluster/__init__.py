"""Serves models on a Ray cluster: `ray_serving` deploys replicas, `ray_replica` is one of them."""
