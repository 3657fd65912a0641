"""Jobs with `min_nodes`, which go on without a node: the scripts of a node, and the curves of a run's generations.

elastic.py starts the program once per generation; meeting.py, a pure function, decides together with the other nodes
which ones form it; wire.py carries their messages; begun.py and ends.py tell why a generation ended. They run in the
container, in one folder with `launcher.container_scripts`. generations.py joins what the generations wrote.
"""
