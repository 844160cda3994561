"""The quantization config of an inference engine, and where it differs from the training.

In reinforcement learning, an engine generates with weights that the training streams to it
(`fp8rs.export.tensors`). Both should quantize the same layers. The rules by which engines match
names were read in compressed-tensors 0.20 (``utils/match.py``), in vLLM
(``quantization/utils/quant_utils.py``, ``is_layer_skipped``) and in transformers 5.23
(``quantizers/quantizers_utils.py``, ``should_convert_module``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from fp8rs._torch import unwrapped
from fp8rs.quantize.recipes import check_choice, check_module

from .formats import FORMATS, serving_format
from .names import Layout, layout_of
from .tensors import (
    Stored,
    is_layer,
    kept_layers,
    named_modules,
    parameters_of,
    quantized_parameters,
)

#: Engines whose rules for names `compare_layers` applies.
ENGINES = ("vllm", "transformers")


def serving_config(
    model: nn.Module, format: str = "fp8-block", *, scale_fmt: str | None = None
) -> dict[str, Any]:
    """Return the ``quantization_config`` that `fp8rs.export.save_pretrained` writes.

    An engine that gets its weights from `fp8rs.export.tensors` is started with it.

    Args:
        model: a model that ``convert_to_float8_training`` has converted.
        format: a format in FP8, as in ``tensors``.
        scale_fmt: as in ``tensors``.

    Returns:
        A dictionary of strings, numbers, lists and dictionaries, with the list of the layers that
        are not quantized.

    Raises:
        ValueError: ``format`` is not one of these.
        TypeError: ``model`` is not a module.
    """
    check_module("model", model)
    serving = serving_format(format, scale_fmt)
    if serving.config is None:
        fp8_formats = [name for name, other in FORMATS.items() if other.config is not None]
        raise ValueError(
            f"format is {format!r}, which has no quantization config; it must be one of "
            f"{', '.join(map(repr, fp8_formats))}"
        )
    return serving.config(*kept_layers(unwrapped(model)))


@dataclass(frozen=True)
class LayerDifferences:
    """The layers that either a training or an engine quantizes. False if there are none.

    Layers have the names that the engine compares: those of the model's files, or for transformers
    those of the model.

    Attributes:
        only_in_training: layers that the training quantizes and the engine does not.
        only_in_engine: layers that the engine quantizes and the training does not.
        unmatched: patterns of the config's ignore list that match no layer, such as misspelt ones.
    """

    only_in_training: tuple[str, ...]
    only_in_engine: tuple[str, ...]
    unmatched: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.only_in_training or self.only_in_engine)

    def __str__(self) -> str:
        lines = []
        groups = {
            "quantized by the training only": self.only_in_training,
            "quantized by the engine only": self.only_in_engine,
            "patterns that match no layer": self.unmatched,
        }
        for title, names in groups.items():
            if names:
                lines.append(f"{title} ({len(names)}): {', '.join(names)}")
        return "\n".join(lines) if lines else "training and engine quantize the same layers"


class _Layer(NamedTuple):
    """A layer under its name in the model or in the model's files.

    Attributes:
        name: its name, without ".weight".
        module: the module that an engine builds from it: the layer, or all experts.
        is_expert: whether it is a matrix of an expert, or all of them.
    """

    name: str
    module: str
    is_expert: bool


@dataclass(frozen=True)
class _LayerNames:
    """A layer under all its names.

    Attributes:
        in_model: the layer under its name in the model.
        in_files: the layers that the model's files have for it, such as one for each expert.
        in_configs: the layer under each name that a config's ignore list may have for it. Lists
            have names of all kinds, because engines differ in what they compare.
    """

    in_model: _Layer
    in_files: list[_Layer]
    in_configs: list[_Layer]


def _names_of(weight: Stored, layout: Layout) -> _LayerNames:
    """Derive the names of a layer from the name of its weight."""
    is_expert = weight.parameter.dim() > 2
    module_name = weight.name.rpartition(".")[0]

    in_files = []
    for part in layout.files_of(weight.name):
        in_files.append(_Layer(part.name.removesuffix(".weight"), part.module, is_expert))

    names = {weight.name.removesuffix(".weight"), module_name}
    for layer in in_files:
        names |= {layer.name, layer.module}
    return _LayerNames(
        in_model=_Layer(module_name, module_name, is_expert),
        in_files=in_files,
        in_configs=[_Layer(name, name, is_expert) for name in names],
    )


def compare_layers(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    engine: Literal["vllm", "transformers"] = "vllm",
) -> LayerDifferences:
    """Compare the layers that a converted model and an inference engine quantize.

    Args:
        model: a model that ``convert_to_float8_training`` has converted.
        config: the contents of the engine's config.json, or its ``quantization_config``. Without
            one, the engine quantizes no layer.
        engine: the engine. vLLM compares the names of the model's files. With ``quant_method``
            "fp8" it requires equal names, and transformers takes regular expressions and ends of
            names.

    Raises:
        ValueError: the config's ``quant_method`` is neither "fp8" nor "compressed-tensors", or
            ``engine`` is not one of these.
        TypeError: ``model`` is not a module, or ``config`` is not a mapping.
    """
    check_module("model", model)
    check_choice("engine", engine, ENGINES)
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping, not {type(config).__name__}")
    if "quant_method" not in config:
        config = config.get("quantization_config") or {}
    matcher = _matcher(config, engine)

    model = unwrapped(model)
    layout = layout_of(model)
    parameters = list(parameters_of(named_modules(model)))
    trained_in_fp8 = quantized_parameters(parameters, layout)

    only_in_training: dict[str, None] = {}
    only_in_engine: dict[str, None] = {}
    matched_patterns: set[str] = set()
    for parameter in parameters:
        if not is_layer(parameter):
            continue
        names = _names_of(parameter, layout)
        for layer in names.in_configs:
            matched_patterns.update(matcher.patterns_of(layer))

        in_training = parameter.name in trained_in_fp8
        for layer in [names.in_model] if engine == "transformers" else names.in_files:
            in_engine = matcher.is_target(layer) and not matcher.patterns_of(layer)
            if in_training and not in_engine:
                only_in_training[layer.name] = None
            elif in_engine and not in_training:
                only_in_engine[layer.name] = None

    unmatched = [pattern for pattern in matcher.ignored if pattern not in matched_patterns]
    return LayerDifferences(tuple(only_in_training), tuple(only_in_engine), tuple(unmatched))


class _Matcher:
    """Base class of the rules by which an engine chooses the layers that it quantizes.

    Attributes:
        ignored: the patterns of layers that are not quantized.
    """

    def __init__(self, ignored: Sequence[str]) -> None:
        self.ignored = ignored

    def is_target(self, layer: _Layer) -> bool:
        """Return whether a layer would be quantized if it were not ignored."""
        return True

    def patterns_of(self, layer: _Layer) -> list[str]:
        """Return the patterns that match a layer."""
        return [pattern for pattern in self.ignored if self.matches(pattern, layer)]

    def matches(self, pattern: str, layer: _Layer) -> bool:
        """Return whether a pattern matches a layer."""
        raise NotImplementedError


class _CompressedTensors(_Matcher):
    """Whole names, or regular expressions from the beginning of a name after "re:"."""

    def __init__(self, ignored: Sequence[str], targets: Sequence[str]) -> None:
        super().__init__(ignored)
        self.targets = targets

    def is_target(self, layer: _Layer) -> bool:
        # All layers are of the class Linear, also the matrices of experts.
        return any(target == "Linear" or self.matches(target, layer) for target in self.targets)

    def matches(self, pattern: str, layer: _Layer) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern.removeprefix("re:"), layer.name) is not None
        return pattern == layer.name


class _Vllm(_Matcher):
    """Whole names. An expert's layer stands for all experts of its module."""

    def matches(self, pattern: str, layer: _Layer) -> bool:
        if layer.is_expert:
            return "experts" in pattern and layer.module in pattern
        return pattern == layer.name


class _Transformers(_Matcher):
    """Regular expressions up to the end of a module's name, or ends of names."""

    def matches(self, pattern: str, layer: _Layer) -> bool:
        up_to_module = rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"
        return layer.name.endswith(pattern) or re.match(up_to_module, layer.name) is not None


def _matcher(config: Mapping[str, Any], engine: str) -> _Matcher:
    """Return the rules of an engine for a quantization config. An empty one has no targets."""
    if not config:
        return _CompressedTensors(ignored=(), targets=())
    method = config.get("quant_method")
    if method == "compressed-tensors":
        targets: list[str] = []
        for group in config.get("config_groups", {}).values():
            targets += group.get("targets", [])
        return _CompressedTensors(config.get("ignore") or (), targets)
    if method == "fp8":
        ignored = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        return _Vllm(ignored) if engine == "vllm" else _Transformers(ignored)
    raise ValueError(
        f"quant_method of config is {method!r}; it must be 'fp8' or 'compressed-tensors'"
    )
