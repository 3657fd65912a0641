"""Scripts of a node in a job with min_nodes: in the container, in one folder with `launcher.container_scripts`."""
