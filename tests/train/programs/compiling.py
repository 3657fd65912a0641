"""`python -m train` with a torch.compile that needs no compiler."""

from tests.train.programs.alike import without_compiler
from train.__main__ import leave, main

if __name__ == "__main__":
    counts = without_compiler()
    code = main()
    print(f"{counts.graphs} graphs were called {counts.calls} times", flush=True)
    leave(code)
