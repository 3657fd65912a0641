"""One pure renderer per target: ClusterPlan -> the text that `launcher export` prints and a cluster accepts."""
