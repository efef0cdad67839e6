"""Run configurations that come with the package: ``demo.yaml`` (what ``vescale-ray demo`` runs) and a fuller example.

Data files, read with ``importlib.resources.files("vescale_ray.configs")``.
"""
