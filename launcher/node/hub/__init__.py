"""One thread for all that only waits for the network: ssh connections, and what is asked of many nodes at once.

With a thread a node, and paramiko's own thread a connection, a hundred nodes spend more time on handing the interpreter
around than on their work. Here each of them is a greenlet, which gives way where it would wait.
"""
