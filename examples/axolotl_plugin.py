"""A plugin of axolotl that converts the model to FP8 before adapters are added and FSDP2 shards it.

PYTHONPATH=examples axolotl train examples/axolotl_plugin.yaml
"""

from axolotl.integrations.base import BasePlugin

import fp8rs
from fp8rs.integrations.transformers import MonitorCallback

# axolotl's own conversion with torchao, and kernels that bypass the forward of layers.
CONTRADICTIONS = ("fp8", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


class Float8Plugin(BasePlugin):
    def pre_model_load(self, cfg):
        for key in CONTRADICTIONS:
            if cfg.get(key):
                raise ValueError(f"{key}: true cannot be combined with Float8Plugin")

    def post_model_build(self, cfg, model):
        fp8rs.convert_to_float8_training(
            model,
            recipe="current",
            filter_fqns=["lm_head"],
        )

    def add_callbacks_post_trainer(self, cfg, trainer):
        # Log what quantization loses, every logging_steps.
        return [MonitorCallback(trainer)]
