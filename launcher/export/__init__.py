"""One pure renderer a target: ClusterPlan -> the text that `launcher export` prints and a cluster takes."""
