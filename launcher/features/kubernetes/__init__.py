"""Jobs as Kubernetes manifests."""
