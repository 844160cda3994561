"""Recipes, which choose formats and scaling, and quantizers, which quantize tensors."""
