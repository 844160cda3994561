"""``fp8rs demo``: train a small Llama in high precision and in FP8 under FSDP2, and compare.

- ``data``: text that every machine has;
- ``model``: a small Llama of plain torch modules;
- ``train``: one training on one rank;
- ``run``: starts the ranks, which run both trainings;
- ``report``: the table, the plot and the JSON file.
"""
