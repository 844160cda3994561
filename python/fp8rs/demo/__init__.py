"""``fp8rs demo``: train a small Llama in high precision and in FP8 under FSDP2, and compare.

- ``data``: text that every machine has;
- ``model``: a small Llama of plain torch modules;
- ``train``: the training on one rank;
- ``launch``: starts and ends the ranks;
- ``run``: checks the options and runs both trainings;
- ``report``: progress, the table, the plot and the JSON file.
"""
