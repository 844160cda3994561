"""``python -m fp8rs demo``: the same small Llama trained in high precision and in FP8 under FSDP2.

- `data`: real text that every machine has.
- `model`: a small Llama of plain torch modules.
- `train`: what one rank does; the two runs differ in one call.
- `traffic`: counts the bytes that a step gathers.
- `launch`, `worker`: starts the ranks, watches them, leaves none behind.
- `report`: the table, the plot and the JSON file.
"""
