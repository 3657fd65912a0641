"""`python -m train` on a CPU that pretends to have as many GPUs as there are processes."""

import os

from tests.gpu import pretend
from train.__main__ import leave, main

if __name__ == "__main__":
    with pretend.gpu(int(os.environ["LOCAL_WORLD_SIZE"])):
        code = main()
    leave(code)
