"""Tests with the libraries that people train with (see `harness`; ``make test-clients``)."""

import importlib.util

#: The clients that nothing else installs: transformers and accelerate serve other tests too.
CLIENTS = ["axolotl", "lightning", "peft", "torchtitan"]

# Where no client is installed these tests would all be skipped: nothing is collected instead.
if not any(importlib.util.find_spec(name) for name in CLIENTS):
    collect_ignore_glob = ["test_*.py"]
