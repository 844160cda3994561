"""What quantizes: recipes, which name formats and rules, and quantizers, which make planes."""
