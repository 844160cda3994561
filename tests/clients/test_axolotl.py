"""axolotl's plugin manager with the plugin of ``examples/axolotl_plugin.py``.

axolotl's model loader and trainer import a dozen packages that need CUDA. These tests run its
PluginManager and BasePlugin, and the hooks in the order of its loader, on a model of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from harness import ROOT, need

need("axolotl", "0.19")
need("transformers", "5.0")
pytest.importorskip("axolotl.integrations.base")

from axolotl.integrations.base import BasePlugin, PluginManager  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402
from transformers.integrations import INTEGRATION_TO_CALLBACK  # noqa: E402

NAME = "axolotl_plugin.Float8Plugin"


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.syspath_prepend(Path(ROOT, "examples"))
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    manager.register(NAME)
    yield manager
    manager.plugins.clear()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))


def converted(model):
    from fp8rs.nn.linear import Float8Linear

    return {n: m.recipe.name for n, m in model.named_modules() if isinstance(m, Float8Linear)}


def test_the_example_converts_a_model(manager):
    cfg = DictDefault(yaml.safe_load(Path(ROOT, "examples/axolotl_plugin.yaml").read_text()))
    assert cfg.plugins == [NAME]
    assert isinstance(manager.plugins[NAME], BasePlugin)
    model = llama()
    manager.pre_model_load(cfg)
    manager.post_model_build(cfg, model)
    assert len(converted(model)) == 7
    assert set(converted(model).values()) == {"current"}
    manager.pre_lora_load(cfg, model)
    manager.post_model_load(cfg, model)


def test_the_page_shows_the_plugin_of_the_example():
    plugin = Path(ROOT, "examples/axolotl_plugin.py").read_text()
    code = plugin[plugin.index("from axolotl") :]
    assert f"```python\n{code}```" in Path(ROOT, "docs/clients.md").read_text()


def test_adapters_are_added_after_the_conversion(manager):
    from peft import LoraConfig, get_peft_model

    model = llama()
    manager.post_model_build(DictDefault({}), model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=4))
    assert [n for n in converted(adapted) if "q_proj" in n] == [
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer"
    ]


@pytest.mark.parametrize("key", ["fp8", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"])
def test_contradicting_keys_are_errors(manager, key):
    with pytest.raises(ValueError, match=f"{key}: true cannot be combined with Float8Plugin"):
        manager.pre_model_load(DictDefault({key: True}))


def test_a_run_is_monitored(manager, tmp_path):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tracker(TrainerCallback):
        steps: ClassVar[list[int]] = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            if any(name.endswith("/sqnr_db") for name in logs):
                self.steps.append(state.global_step)

    cfg = DictDefault({})
    manager.post_model_build(cfg, model := llama())
    rows = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 4
    arguments = TrainingArguments(
        tmp_path,
        max_steps=4,
        per_device_train_batch_size=1,
        logging_steps=2,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(INTEGRATION_TO_CALLBACK, "tracker", Tracker)
        trainer.add_callback(Tracker)
        for callback in manager.add_callbacks_post_trainer(cfg, trainer):
            trainer.add_callback(callback)
        trainer.train()
    assert Tracker.steps == [1, 3]
