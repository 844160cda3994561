"""Tests with the libraries that people train with (see `harness`; ``make test-clients``)."""

import importlib.util

#: The clients. transformers is not among them: the other tests have it too.
CLIENTS = ["accelerate", "axolotl", "lightning", "peft", "torchtitan"]

# Where no client is installed these tests would all be skipped: nothing is collected instead.
if not any(importlib.util.find_spec(name) for name in CLIENTS):
    collect_ignore_glob = ["test_*.py"]
