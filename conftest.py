"""Fixtures of all tests, and what holds for a whole run."""

import torch

# Their fixtures serve every test, and what they assert is explained like in a test.
pytest_plugins = ["tests.cases", "tests.emulation", "tests.problems", "tests.engines", "tests.machine_code"]

# Without a GPU operands are small, and compilers run beside the tests: torch's threads, which spin where they wait for
# one another, took most of the time of some tests.
if not torch.cuda.is_available():
    torch.set_num_threads(1)
