"""ClusterPlan -> the text that `launcher export` prints and a cluster accepts."""
